"""Sort: the accesses of a batch grouped by row, found while the batch is looked up (§5.3).

Accesses are sorted by row, or their rows are numbered, which takes less time if a rank of one
thread reads few rows many times. Only backward needs either, unless distinct rows are fetched. So
if a rank has twice the cores that its threads take, a thread of its own does this during the
forward pass.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from oper.base import native
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Device
from oper.runtime.memory.prepared_batch import BatchRows, rows_of_tensors

native.ops()  # defines the operators

# Rows that a batch may name for each access, up to which rows are numbered: there must be a mark
# for each of these rows, in each bucket, for all of its width (docs/design/numbered-rows.md).
ROWS_PER_ACCESS = 4
# Values of a module's widest rows up to which rows are numbered: for any bags, and for bags of
# LONG_BAG ids on average. Sums of wide rows leave the caches between two accesses, which pays only
# if a bag's gradient is read once for many.
NARROW_DIM, MOST_DIM = 32, 64
LONG_BAG = 10
_MOST_ROWS = 2**31 - 1  # the kernel numbers them by 32 bits


class Sorter:
    """The sort of one engine's batches, which are on `device`. `bucket_slots` are each bucket's
    slots at the rank that has the most, and `dims` the values of its rows. `by_position`: sorted
    accesses are given by their positions, not by their bags; `always`: accesses must be sorted.
    With `bad_ids_too`, no rows are found for a batch whose report names a bad id."""

    def __init__(
        self,
        node: Node,
        device: Device,
        bucket_slots: Sequence[int],
        dims: Sequence[int],
        by_position: bool,
        always: bool,
        bad_ids_too: bool = True,
    ) -> None:
        self._bad_ids_too = bad_ids_too
        self.rank, self._ranks, self._device = node.rank, node.ranks, device
        self.bucket_slots = list(bucket_slots)
        self._widest = max(dims, default=0)
        self._by_position, self._always = by_position, always
        cores = len(os.sched_getaffinity(0)) // len(node.peers)
        spare = cores >= 2 * torch.get_num_threads()
        beside = spare and device.kind == "cpu"  # a device works in parallel with the host anyway
        self._thread = ThreadPoolExecutor(1, "oper-sort") if beside else None

    def resize(self, bucket_slots: Sequence[int]) -> None:
        """Follow the arenas: each bucket has these slots from now on, at the rank that has the
        most."""
        self.bucket_slots = list(bucket_slots)

    def sort(
        self,
        addresses: torch.Tensor,
        segment_offset: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        features: torch.Tensor,
        at_once: bool,
        report: torch.Tensor | None = None,
    ) -> BatchRows | Future[BatchRows]:
        """Return the rows of a batch, or a future of them if they are not needed `at_once`. There
        are no rows for a batch whose `report` names a bad bag, or a bad id that is fatal."""
        read = (addresses, segment_offset, features, self.rank, self._ranks)
        bag_count = len(addresses) if offsets is None else len(offsets) - 1
        if self._numbers(len(addresses), bag_count):
            return self._done(at_once, self._number, *read)
        bags = offsets if self.by_bag(offsets, weights) else None
        return self._done(at_once, self._sort, *read, bags, report)

    def by_bag(self, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> bool:
        """Say whether the runs of such a batch hold bags."""
        return offsets is not None and weights is None and not self._by_position

    def _numbers(self, accesses: int, bags: int) -> bool:
        """Say whether a batch's rows are numbered instead of its accesses sorted. Each of several
        threads sums rows of its own, for which accesses must be sorted."""
        rows = (1 + self._ranks) * sum(self.bucket_slots)
        few = rows <= min(ROWS_PER_ACCESS * accesses, _MOST_ROWS)
        widest = MOST_DIM if accesses >= LONG_BAG * bags else NARROW_DIM
        wanted = self._widest <= widest and not self._always
        alone = torch.get_num_threads() == 1 and self._device.kind == "cpu"
        return few and wanted and alone

    def _done(self, at_once: bool, find: Callable[..., BatchRows], *given: Any) -> Any:
        if self._thread is None or at_once or torch.compiler.is_compiling():
            return find(*given)
        return self._thread.submit(find, *given)

    def _number(self, *read: Any) -> BatchRows:
        tensors = native.ops().number_rows(*read, self.bucket_slots)
        return rows_of_tensors(tensors, self._ranks, by_bag=False)

    def _sort(self, *given: Any) -> BatchRows:
        *read, bags, report = given
        ops, stream = self._device.ops(), self._device.stream
        of_device = (stream, report, self._bad_ids_too)
        tensors = ops.sort_accesses(*read, self.bucket_slots, bags, *of_device)
        return rows_of_tensors(tensors, self._ranks, bags is not None)


# Shapes of the operators' results for torch.compile: the number of accesses that a batch sorts, and
# of the rows that they read, depend on its data.


@torch.library.register_fake("oper::sort_accesses")
def _sorted_shapes(
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    features: torch.Tensor,
    rank: int,
    ranks: int,
    bucket_slots: Sequence[int],
    offsets: torch.Tensor | None = None,
    stream: int = 0,
    report: torch.Tensor | None = None,
    bad_ids_too: bool = False,
) -> tuple[torch.Tensor, ...]:
    context = torch.library.get_ctx()
    accesses, runs = context.new_dynamic_size(), context.new_dynamic_size()
    positions = addresses.new_empty(accesses, dtype=torch.int32)
    run_start = addresses.new_empty(runs + 1, dtype=torch.int32)
    run_count = addresses.new_empty(len(bucket_slots) * (ranks + 1) + 1)
    return positions, run_start, addresses.new_empty(runs), run_count


@torch.library.register_fake("oper::number_rows")
def _numbered_shapes(
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    features: torch.Tensor,
    rank: int,
    ranks: int,
    bucket_slots: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    rows = torch.library.get_ctx().new_dynamic_size()
    row_of = addresses.new_empty(addresses.numel(), dtype=torch.int32)
    before = addresses.new_empty(2, len(bucket_slots) * (ranks + 1) + 1)
    return row_of, addresses.new_empty(rows), before
