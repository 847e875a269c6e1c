"""Counts of all ranks of a model, gathered on rank 0.

In: each rank's counters of its collections. Out: on rank 0 a `Profile` of each rank, of the plan's
tables. A rank sends its counts in their file format, about 3 bytes per row that it read, so the
traffic depends on the number of counts and not on the tables' sizes. The ranks use a separate gloo
process group, so that these messages are independent of the order of a step's collectives.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.logs.table_discovery import Prepared
from oper.profiling.counter_arrays import samples_with_row_offsets
from oper.profiling.counter_files import SparseCounts, sparse_counts
from oper.profiling.profile import Profile
from oper.profiling.row_counters import RowCounters
from oper.runtime.comm.group import Group, own_gloo_group
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table

_COUNTERS = ("accesses", "samples_with_row")
_PARTS = tuple(field.name for field in fields(SparseCounts))[1:]
_TYPES = {"block_starts": np.int64, "rows": np.uint16, "counts": np.uint8}


class MonitoredRanks:
    """The ranks of a model, as a monitor's messages to rank 0 use them; one rank needs no group."""

    def __init__(self, group: Group | None, deadline_seconds: float) -> None:
        """Open a gloo group next to the model's `group`. Call it on all ranks of the model."""
        self.rank, self.ranks = (0, 1) if group is None else (group.rank, group.ranks)
        self._own: Any = None
        self._group: Group | None = None
        if group is not None:
            self._own = own_gloo_group(group.members, deadline_seconds, "monitor")
            self._group = Group(self._own, deadline_seconds)

    def gather(self, message: bytes, action: str) -> list[bytes]:
        """Return each rank's message, of one length. `action` completes, in errors, "rank 0 waited
        for rank 2 to …"."""
        return [message] if self._group is None else self._group.gather(message, action)

    def gather_on_first(self, message: bytes, action: str) -> list[bytes]:
        """Return each rank's message, of any length, on rank 0; nothing on the others."""
        sizes = self.gather(np.int64(len(message)).tobytes(), action)
        if self._group is None:
            return [message]
        lengths = [int(np.frombuffer(size, np.int64)[0]) for size in sizes]
        sent = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
        received = torch.empty(sum(lengths) if self.rank == 0 else 0, dtype=torch.uint8)
        self._group.run(
            dist.all_to_all_single,
            received,
            sent,
            output_split_sizes=lengths if self.rank == 0 else [0] * self.ranks,
            input_split_sizes=[len(message)] + [0] * (self.ranks - 1),
            action=action,
        )
        if self.rank != 0:
            return []
        return [part.numpy().tobytes() for part in received.split(lengths)]

    def close(self) -> None:
        """Leave the group."""
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
        self._own, self._group = None, None


def in_plans_tables(counted: Sequence[RowCounters], tables: Sequence[Table]) -> Profile:
    """Return the counts of a model's collections as a profile of a plan's tables. Tables in no
    collection have no accesses.

    Collections may have seen different numbers of samples, for example if one is read twice per
    sample; the profile has the largest of the numbers.
    """
    place = {
        table.name: (each, number) for each in counted for number, table in enumerate(each.tables)
    }
    number_in_plan = {table.name: number for number, table in enumerate(tables)}
    bagged = tuple(
        table.name in place and place[table.name][0].bagged[place[table.name][1]]
        for table in tables
    )
    dtype = max((each.accesses.dtype for each in counted), key=lambda t: t.itemsize)
    accesses: list[Any] = [np.zeros(0, dtype)]
    samples_with_row: list[Any] = [np.zeros(0, dtype)]
    profiles = {id(each): each.profile({}) for each in counted}
    for table, has_bags in zip(tables, bagged, strict=True):
        if table.name not in place:
            accesses.append(np.zeros(table.rows, dtype))
            continue
        of, number = place[table.name]
        accesses.append(profiles[id(of)].table_accesses(number))
        if has_bags:
            samples_with_row.append(profiles[id(of)].table_samples_with_row(number))
    pairs, distinct = [np.zeros((0, 3), np.int64)], np.zeros(len(tables), np.int64)
    for each in counted:
        numbers = np.array([number_in_plan[table.name] for table in each.tables])
        lengths = each.bag_lengths
        of_plan = lengths.pairs
        of_plan[:, 0] = numbers[of_plan[:, 0]]
        pairs.append(of_plan)
        distinct[numbers] = lengths.distinct
    return Profile(
        tuple(tables),
        max(each.samples for each in counted),
        np.concatenate(accesses).astype(dtype, copy=False),
        np.concatenate(samples_with_row).astype(dtype, copy=False),
        bagged,
        vocabularies=Prepared(tuple(tables)),
        bag_lengths=BagLengths.of_pairs(np.concatenate(pairs), distinct),
    )


def packed(profile: Profile) -> bytes:
    """Return a rank's counts as a message."""
    bags = profile.bag_lengths
    assert bags is not None, "a monitor counts them"
    arrays: list[Any] = [np.array(profile.bagged, np.uint8), bags.distinct, bags.pairs]
    for name in _COUNTERS:
        sparse = sparse_counts(getattr(profile, name))
        arrays += [getattr(sparse, part) for part in _PARTS]
    wide = profile.accesses.dtype == np.uint64
    header = [profile.samples, int(wide), *(array.nbytes for array in arrays)]
    return b"".join(a.tobytes() for a in (np.array(header, np.int64), *arrays))


def unpacked(message: bytes, tables: Sequence[Table]) -> Profile:
    """Return the counts that `packed` made a message of."""
    parts = 3 + len(_COUNTERS) * len(_PARTS)
    header = np.frombuffer(message, np.int64, 2 + parts)
    starts = header.nbytes + np.concatenate([[0], np.cumsum(header[2:])])
    pieces = iter([message[first:end] for first, end in pairwise(starts.tolist())])
    bagged = tuple(bool(flag) for flag in next(pieces))
    distinct = np.frombuffer(next(pieces), np.int64)
    pairs = np.frombuffer(next(pieces), np.int64).reshape(-1, 3)
    types = _TYPES | {"large_counts": np.uint64 if header[1] else np.uint32}
    sizes = (sum(t.rows for t in tables), int(samples_with_row_offsets(tables, bagged)[-1]))
    counters: list[Any] = [
        SparseCounts(size, *(np.frombuffer(next(pieces), types[part]) for part in _PARTS))
        for size in sizes
    ]
    return Profile(
        tuple(tables),
        int(header[0]),
        counters[0],
        counters[1],
        bagged,
        vocabularies=Prepared(tuple(tables)),
        bag_lengths=BagLengths.of_pairs(pairs, distinct),
    )
