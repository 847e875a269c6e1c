"""The check that all ranks' copies of the replicas are equal, bit by bit, and the list of those
that are not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oper.base import native
from oper.runtime.comm.group import Group

_BLOCK_ROWS = 1024
_MOST_BLOCKS = 64  # whose rows are compared: enough to find the fault


@dataclass(frozen=True)
class UnequalReplica:
    """Row `slot` of the `part`-th tensor given. `ranks` hold another copy than most ranks do; of
    copies that are equally frequent, the lowest rank's counts as the right one."""

    part: int
    slot: int
    ranks: tuple[int, ...]


def unequal_replicas(
    parts: Sequence[torch.Tensor], group: Group | None, holders: Sequence[int] = ()
) -> list[UnequalReplica]:
    """Return the replicas that are not equal on all `holders`, all ranks if none are given; the
    same list on every rank.

    `parts` are a rank's copies, uint8 [rows, bytes] each and of equal shapes on all ranks: rows, or
    optimizer state; the parts of ranks other than the holders do not matter. All ranks call this
    together, when none of them is writing.
    """
    held = list(holders) or slice(None)
    blocks = _gather([native.ops().digest_rows(part, _BLOCK_ROWS) for part in parts], group)
    unequal = []
    for p, (part, digests) in enumerate(zip(parts, blocks, strict=True)):
        digests = digests[held]
        differ = (digests != digests[0]).any(dim=0).nonzero().flatten().tolist()[:_MOST_BLOCKS]
        begins = [_BLOCK_ROWS * block for block in differ]
        rows = [native.ops().digest_rows(part[b : b + _BLOCK_ROWS], 1) for b in begins]
        for begin, gathered in zip(begins, _gather(rows, group), strict=True):
            of_holders = gathered[held]
            rows_differ = (of_holders != of_holders[0]).any(dim=0).nonzero().flatten().tolist()
            unequal += [
                UnequalReplica(p, begin + row, _minority(of_holders[:, row].tolist(), holders))
                for row in rows_differ
            ]
    return unequal


def _minority(digests: list[int], holders: Sequence[int]) -> tuple[int, ...]:
    usual = Counter(digests).most_common(1)[0][0]  # of equally frequent ones the first
    ranks = holders or range(len(digests))
    return tuple(rank for rank, digest in zip(ranks, digests, strict=True) if digest != usual)


def _gather(vectors: Sequence[torch.Tensor], group: Group | None) -> list[torch.Tensor]:
    """Return the vectors of all ranks, [ranks, n] each."""
    if not vectors:
        return []
    own = torch.cat(list(vectors))
    gathered = [own]
    if group is not None:
        gathered = [own.clone() for _ in range(group.ranks)]
        group.run(dist.all_gather, gathered, own, action="compare replicas")
    return list(torch.stack(gathered).split([len(v) for v in vectors], dim=1))
