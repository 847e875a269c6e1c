"""Equal settings: settings of optimizers that a script may change, compared by all ranks in a step.

Every rank updates its copies of a row by its own settings, so copies diverge if these differ, and a
row with one owner is trained by the owner's settings. So each rank leaves a digest of its settings
with its gradients, and compares the digests of all ranks before it updates any row. Ranks of one
node leave it in memory that they share. Between nodes it goes with the numbers of gradients
(row_messages.py), or by a collective of its own if a step sends none.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, Segment

_VALUES_OF_LINE = LINE_BYTES // 8
_ACTION = "compare the settings of its optimizers"


class StepSettings(NamedTuple):
    """The settings of one update: the learning rate of each bucket; the steps that the optimizers
    have counted more than the engine; and the tables that were frozen in each batch."""

    rates: tuple[float, ...]
    counted_before: int
    frozen: tuple[tuple[str, ...], ...]


class EqualSettings:
    """The comparison of one engine's settings; `tables` are the names of each bucket's.

    All ranks of the group make it together, and call `offer` and `check` in each step. `digests`,
    int64 [ranks], hold this rank's after `offer`, and must hold those of all ranks before `check`:
    if they are `carried`, the fetch path exchanges them.
    """

    def __init__(self, node: Node, tables: Sequence[Sequence[str]]) -> None:
        self._node, self._tables = node, tables
        self._settings: StepSettings | None = None
        self._finish: Callable[[], None] | None = None
        self.carried = False
        digests = torch.zeros(node.ranks, _VALUES_OF_LINE, dtype=torch.int64)
        self._shared = len(node.peers) == node.ranks
        if self._shared:
            size = LINE_BYTES * node.ranks
            segment = node.share_first(Segment.create(size, size, "settings"))
            digests = segment.tensor(0, digests.shape, torch.int64)
        self.digests = digests.numpy()[:, 0]  # torch would take microseconds for each value

    def offer(self, settings: StepSettings) -> None:
        """Let the other ranks read this rank's settings. On one node the signal that announces them
        follows, and comes after the signal that all have taken the step before."""
        if settings != self._settings:
            self._settings = settings
            digest = hashlib.blake2b(repr(settings).encode(), digest_size=8).digest()
            self.digests[self._node.rank] = int.from_bytes(digest, "little", signed=True)
        if not self._shared and not self.carried:
            assert self._node.group is not None
            gathered = torch.from_numpy(self.digests.copy())
            mine = gathered[self._node.rank : self._node.rank + 1].clone()
            gather = dist.all_gather_into_tensor
            finish = self._node.group.start(gather, gathered, mine, action=_ACTION)

            def take() -> None:
                finish()
                self.digests[:] = gathered.numpy()

            self._finish = take

    def check(self) -> None:
        """Compare all ranks' settings. Raise OperError on all of them, with the first difference,
        if they differ."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        if len(set(self.digests.tolist())) == 1:
            return
        assert self._settings is not None
        rates, counted_before, frozen = self._settings
        settings = {"steps that the optimizers counted before": str(counted_before)}
        for (first, *others), rate in zip(self._tables, rates, strict=True):
            more = f" and {len(others)} more" if others else ""
            settings[f"lr of {first!r}{more}"] = repr(rate)
        for batch, tables in enumerate(frozen, 1):
            which = f" in batch {batch}" if len(frozen) > 1 else ""
            settings[f"frozen tables{which}"] = ", ".join(map(repr, tables)) or "none"
        raise self._node.unequal(settings, "the settings of the tables' optimizers")
