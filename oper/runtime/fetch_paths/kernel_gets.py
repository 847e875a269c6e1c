"""Kernel gets: kernels get rows of other nodes by NVSHMEM, and gradients too (§5: one-sided).

With raw fetches the kernel that adds up bags gets each row as it comes to it; with distinct ones a
kernel brings every distinct row of other ranks into a buffer before. Gradients go by the gets of
gradient_gets.py. Nothing orders a get after what it reads, so in training the hosts of all nodes
tell each other when rows have been read, and when they are updated.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import numpy as np
import torch

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.plan.layout import Layout
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import Arrived, Fetched, FetchPath, Needs
from oper.runtime.fetch_paths.gradient_gets import GradientGets
from oper.runtime.fetch_paths.row_exchange import count_relayed, groups_of
from oper.runtime.memory import runtime_plan
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch, Runs
from oper.runtime.memory.symmetric_memory import SymmetricMemory
from oper.runtime.tables.features import FeatureSet
from oper.runtime.tables.kernel_structs import FEATURE
from oper.runtime.tables.row_gradients import RowGradients

_LOOKUP = FEATURE.names.index("lookup") if FEATURE.names else 0


class KernelGets(FetchPath):
    """The path of all tables of an engine whose rows are in `symmetric` memory. `distinct`: rows of
    other ranks are brought once each. `trains`: gradients are exchanged, if there are several
    nodes."""

    def __init__(
        self,
        memory: TableMemory,
        symmetric: SymmetricMemory,
        features: FeatureSet,
        layout: Layout,
        counters: Counters,
        *,
        distinct: bool,
        trains: bool,
    ) -> None:
        super().__init__(memory)
        assert isinstance(self._device, Cuda)
        self._signals, self._symmetric, self._distinct = memory.signals, symmetric, distinct
        self._counters = counters
        row_bytes = [self._heap.rows(b.width).shape[1] for b in self._buckets]
        self._row_bytes, self._widest_row = row_bytes, max(row_bytes, default=1)
        self._sizes = torch.tensor(row_bytes, dtype=torch.int64).to(self._device.torch_device)
        self._far = self._far_lookups(features, layout)
        away = [rank for rank in range(self._ranks) if rank not in self._node.peers]
        self._several, self._away = bool(away), away
        self._trained = [b for b, bucket in enumerate(self._buckets) if bucket.trained]
        self._gets = GradientGets(self._node, symmetric, away, self._device)
        self.needs = Needs(
            rows=distinct,
            runs=distinct,
            messages=self._several and trains,
            fetched_row_bytes=max(row_bytes, default=0) if distinct else 0,
        )

    def _far_lookups(self, features: FeatureSet, layout: Layout) -> torch.Tensor:
        """Return the lookups that may read rows of ranks whose memory is not mapped here, bool
        [lookups]."""
        mapped = self._heap.mapped_ranks
        if len(mapped) == self._ranks:
            return torch.zeros(len(features.features), dtype=torch.bool)
        far = set(range(self._ranks)) - set(mapped)
        tables = runtime_plan.tables_of_ranks(layout, self._rank, far)
        return torch.tensor([bool(tables[features.index(f)]) for f in features.features])

    # Rows.

    def reading(self) -> AbstractContextManager[None]:
        """See FetchPath."""
        return self._symmetric.reading()

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath. The number of distinct rows is known to the device alone: the buffer has
        room for as many as there are accesses."""
        if not self._distinct:
            return Fetched(batch.addresses, self._heap.bases)
        runs = batch.rows
        assert isinstance(runs, Runs)  # of the positions of accesses
        room = len(batch.addresses) + len(self._buckets)
        buffer = self._symmetric.fetched.of(room * self._widest_row)
        addresses, bases = batch.addresses.clone(), self._heap.bases.clone()
        bases[:, self._ranks] = buffer.data_ptr()
        self._device.ops().fetch_rows(
            addresses,
            runs.positions,
            runs.starts,
            runs.slots,
            runs.before,
            self._heap.bases,
            self._heap.far,
            [bucket.width for bucket in self._buckets],
            self._row_bytes,
            self._sizes,
            buffer,
            self._rank,
            self._device.stream,
            batch.report,
        )
        return Fetched(addresses, bases, [buffer])

    def fetch_again(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        if not self._distinct and bool(self._far_features(batch.features).any()):
            raise OperError(
                "gradients of weights need the rows again, and a plan with "
                f"{option('--fetch', 'raw')} reads those of other nodes in the lookup's kernel "
                f"alone: plan with {option('--fetch', 'distinct')}, or look up under "
                "torch.no_grad()"
            )
        return self.fetch(batch, but)

    def add_up(
        self, batch: PreparedBatch, rows: Fetched, features: torch.Tensor, elements: int
    ) -> torch.Tensor:
        """See FetchPath."""
        far = self._far_features(features)
        sums: torch.Tensor = self._device.ops().pooled_rows_by_gets(
            rows.addresses,
            batch.offsets,
            batch.weights,
            features,
            rows.bases,
            self._heap.far,
            torch.zeros_like(far) if self._distinct else far,
            self._symmetric.stage,
            self._rank,
            elements,
            torch.float32,
            self._device.stream,
            batch.report,
        )
        return sums

    def _far_features(self, features: torch.Tensor) -> torch.Tensor:
        """Return which of some features may read rows of ranks whose memory is not mapped, [F]."""
        return self._far[features[:, _LOOKUP]]

    # Gradients.

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        """See FetchPath. Lookups of other nodes read rows that are updated next, with gradients or
        without: all ranks wait for them, and kernels bring the gradients that others have by then.
        """
        if not self._several:
            return Arrived()
        bring: Callable[[], dict[int, RowGradients]] = dict
        if self._trained:
            dims = [self._buckets[b].dim for b in self._trained]
            groups = groups_of(self._away, self._trained, self._ranks)
            action = f"exchange gradients (step {step})"
            parts = [mailbox(self._rank)]
            counts, bring = self._gets.offer_gradients(parts, groups, dims, action)
            count_relayed(
                self._counters,
                "relayed_gradient",
                self._ranks,
                self._away,
                counts,
                4 * np.array(dims),
            )
        self._tell_nodes(f"read its rows (step {step})")
        return Arrived(bring(), self._trained, range(self._ranks))

    def updated(self, step: int) -> None:
        """See FetchPath. Nothing else orders the next lookups of other nodes, which ask no rank
        here, after this rank's update."""
        if self._several:
            self._tell_nodes(f"update its rows (step {step})")

    def _tell_nodes(self, action: str) -> None:
        """Wait until all ranks of all nodes come here, and all work that they started is done."""
        assert self._node.group is not None
        self._device.synchronize()  # if a rank is alone on its node, no signal has waited for it
        self._node.group.gather(b"0", action)

    def close(self) -> None:
        """See FetchPath. The memory is freed with all ranks together."""
        self._symmetric.close(self._signals)
