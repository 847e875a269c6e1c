"""Sort: which accesses of a batch read the same row, found while the batch is looked up (§5.3).

Only backward needs the order, unless distinct rows are fetched. So where a rank has twice the cores
that its threads take, the sort runs in a thread of its own, beside the forward pass.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from oper.base import native
from oper.runtime.comm.node import Node
from oper.runtime.memory.sorted_accesses import Runs

native.ops()  # which defines the operator


class Sorter:
    """The sort of one engine's batches, whose tables are in so many buckets; `by_position` where
    the positions of accesses are needed, and not their bags."""

    def __init__(self, node: Node, buckets: int, by_position: bool) -> None:
        self._rank, self._ranks, self._buckets = node.rank, node.ranks, buckets
        self._by_position = by_position
        cores = len(os.sched_getaffinity(0)) // len(node.peers)
        spare = cores >= 2 * torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "oper-sort") if spare else None

    def sort(
        self,
        addresses: torch.Tensor,
        segment_offset: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        features: torch.Tensor,
        at_once: bool,
    ) -> Runs | Future[Runs]:
        """The runs of a batch, or a future of them, if they are not needed `at_once`."""
        bags = offsets if self.by_bag(offsets, weights) else None
        given = (addresses, segment_offset, features, bags)
        if self._thread is None or at_once or torch.compiler.is_compiling():
            return self._sort(*given)
        return self._thread.submit(self._sort, *given)

    def by_bag(self, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> bool:
        """Whether the runs of such a batch are of bags."""
        return offsets is not None and weights is None and not self._by_position

    def _sort(
        self,
        addresses: torch.Tensor,
        segment_offset: torch.Tensor,
        features: torch.Tensor,
        bags: torch.Tensor | None,
    ) -> Runs:
        found = native.ops().sort_accesses(
            addresses, segment_offset, features, self._rank, self._ranks, self._buckets, bags
        )
        return Runs.of_tensors(found, self._ranks, bags is not None)


# What torch.compile must know of the operator: how many accesses a batch sorts, and how many rows
# they read, is known only from its data.


@torch.library.register_fake("oper::sort_accesses")
def _sorted_shapes(
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    features: torch.Tensor,
    rank: int,
    ranks: int,
    buckets: int,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    context = torch.library.get_ctx()
    accesses, runs = context.new_dynamic_size(), context.new_dynamic_size()
    positions = addresses.new_empty(accesses, dtype=torch.int32)
    run_start = addresses.new_empty(runs + 1, dtype=torch.int32)
    run_count = addresses.new_empty(buckets * (ranks + 1) + 1)
    return positions, run_start, addresses.new_empty(runs), run_count
