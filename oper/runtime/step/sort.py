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
    """The sort of one engine's batches, whose tables are in so many buckets."""

    def __init__(self, node: Node, buckets: int) -> None:
        self._rank, self._ranks, self._buckets = node.rank, node.ranks, buckets
        cores = len(os.sched_getaffinity(0)) // len(node.peers)
        spare = cores >= 2 * torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "oper-sort") if spare else None

    def sort(
        self,
        addresses: torch.Tensor,
        segment_offset: torch.Tensor,
        features: torch.Tensor,
        at_once: bool,
    ) -> Runs | Future[Runs]:
        """The runs of a batch, or a future of them, if they are not needed `at_once`."""
        if self._thread is None or at_once or torch.compiler.is_compiling():
            return self._sort(addresses, segment_offset, features)
        return self._thread.submit(self._sort, addresses, segment_offset, features)

    def _sort(
        self, addresses: torch.Tensor, segment_offset: torch.Tensor, features: torch.Tensor
    ) -> Runs:
        found = native.ops().sort_accesses(
            addresses, segment_offset, features, self._rank, self._ranks, self._buckets
        )
        return Runs.of_tensors(found, self._ranks)


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
) -> tuple[torch.Tensor, ...]:
    context = torch.library.get_ctx()
    accesses, runs = context.new_dynamic_size(), context.new_dynamic_size()
    positions = addresses.new_empty(accesses, dtype=torch.int32)
    run_start = addresses.new_empty(runs + 1, dtype=torch.int32)
    run_count = addresses.new_empty(buckets * (ranks + 1) + 1)
    return positions, run_start, addresses.new_empty(runs), run_count
