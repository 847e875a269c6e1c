"""The training step: forward and backward of a prepared batch, as the operator calls them.

    forward    the rows of every bag are read, each table's by its fetch path
               (fetch_paths/fetch_path.py)
    backward   the gradients of each row are summed and sent to its owner, and every row that was
               touched is updated once (apply_gradients.py)

In inference there is only the forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.runtime.comm.engine_lifetime import EngineGuard
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import FetchPath
from oper.runtime.fetch_paths.read_counts import ReadCounts
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.placement import Placement
from oper.runtime.memory.prepared_batch import BatchRows, PreparedBatch, rows_of_tensors
from oper.runtime.memory.step_room import NO_ROOM, StepRoom
from oper.runtime.memory.stream_order import StreamOrder
from oper.runtime.step.apply_gradients import Gradients
from oper.runtime.step.batch_checks import check_finite
from oper.runtime.step.captured_step import CapturedStep
from oper.runtime.step.device_signals import DeviceSignals
from oper.runtime.step.fixed_rows import FixedRows
from oper.runtime.step.prepare_batch import BatchPreparer
from oper.runtime.step.sort import Sorter
from oper.runtime.tables.features import Feature, FeatureSet


class TrainingStep:
    """The steps of one engine, whose rows are trained by `gradients` or fixed.

    `checked_features` are the module's lookups if gradients are checked for NaN, else None.
    `frozen_tables` is called in forward and backward and returns the module's tables, by number,
    that are trained in general but not now.
    """

    def __init__(
        self,
        guard: EngineGuard,
        memory: TableMemory,
        placement: Placement,
        preparer: BatchPreparer,
        sorter: Sorter,
        path: FetchPath,
        gradients: Gradients | FixedRows,
        counters: Counters,
        room: StepRoom,
        features: FeatureSet,
        checked_features: Sequence[Feature] | None = None,
    ) -> None:
        self._guard, self._signals, self._heap = guard, memory.signals, memory.heap
        self._placement, self._preparer = placement, preparer
        self.in_graphs = False
        self._sorter, self._path = sorter, path
        distinct = placement.plan.workload.known_fetch == "distinct"
        self._reads = ReadCounts(memory, distinct)
        self._gradients, self._counters, self._room = gradients, counters, room
        self._features, self._checked_features = features, checked_features
        self.frozen_tables: Callable[[], frozenset[int]] = frozenset
        self._frozen: frozenset[int] = frozenset()  # in the last backward
        self._on_device = memory.heap.device.kind != "cpu"
        self._order = StreamOrder(memory.heap.device)
        self._all_trained = all(bucket.trained for bucket in memory.buckets)
        self._node = memory.node
        self.rank, self.ranks = memory.node.rank, memory.node.ranks

    @property
    def steps(self) -> int:
        """The number of updates."""
        return self._gradients.steps

    def check_graphs(self) -> None:
        """Raise OperError if a graph, which is about to look the tables up, cannot."""
        if self._placement.version:  # a graph's batch does not know the map it was prepared by
            raise OperError(
                "a graph of torch.compile cannot look up tables whose rows have migrated: leave "
                "the lookup out of it, as the sharded modules do"
            )
        self.in_graphs = True
        self._path.check_graphs()
        if self._heap.device.kind != "cpu":  # a graph's batch has no report (late_checks.py)
            raise OperError(
                f"a graph of torch.compile cannot look up tables on {self._heap.device.kind} "
                "devices: leave the lookup out of it, as the sharded modules do"
            )

    def to_capture(self) -> CapturedStep:
        """Return a step that is going to be captured. Raise OperError if steps of this engine
        cannot be."""
        late, signals = self._preparer.late, self._signals
        if late is None or not isinstance(signals, DeviceSignals):
            raise OperError(
                "the tables are on the CPU, where there are no graphs: shard the model with "
                'device="cuda:0", or call the step as it is'
            )
        if len(self._node.peers) < self._node.ranks:
            raise OperError(
                "a step of ranks on several nodes cannot be captured, as the host must be told how "
                "many rows go from node to node: call the step as it is"
            )
        if self._path.needs.rows:
            raise OperError(
                f"a step of a plan with {option('--fetch', 'distinct')} cannot be captured, as the "
                f"host must know how many rows are copied: plan with {option('--fetch', 'raw')}, "
                "or call the step as it is"
            )
        if self._checked_features is not None:
            raise OperError(
                "a step whose gradients are checked cannot be captured, as the host looks at them: "
                "leave check_gradients out"
            )
        placed = (self._placement, self._order, late, self._counters)
        return CapturedStep(self._guard, signals, *placed, self._gradients)

    def rates_are_used(self) -> bool:
        """Return whether the step that is captured has updated rows (apply_gradients.py)."""
        return self._gradients.rates_are_used()

    @property
    def memory(self) -> list[object]:
        """The objects that a captured step reads, writes and by which it finds rows: the step is
        out of date if any of them is another object."""
        rows = [self._placement.map, self._heap.views, self._sorter.bucket_slots]
        return [*rows, *self._heap.touched.all_marks, *self._gradients.memory]

    def rows_of(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> BatchRows | None:
        """Return the rows of a batch, if they were found, from their tensors."""
        by_bag = self._sorter.by_bag(offsets, weights)
        return rows_of_tensors(tensors, self.ranks, by_bag) if tensors else None

    def current(self, batch: PreparedBatch) -> PreparedBatch:
        """Return a batch with present addresses, prepared again if rows have moved. Work that is
        started from now on comes after its preparation, which may be on another stream."""
        if batch.version != self._placement.version:
            with self._guard.failing_together():
                return self._preparer.again(batch)
        if batch.ready is not None and self._heap.device.capture is None:
            self._heap.device.after([batch.ready])
        return batch

    def forward(self, batch: PreparedBatch) -> torch.Tensor:
        """Return the output of a batch, flat float32 [out_elements], from the rows after all steps
        so far."""
        self._guard.check()
        self._heap.device.check_no_capture()
        with self._placement.reading, self._guard.failing_together():
            batch = self.current(batch)
            self._gradients.wait_for_rows()
            if self._path.needs.rows:
                self._count_distinct(batch)
            self._order.before_read(self._path.needs.shared_fetch)
            try:
                self._reads.count(batch, self._counters)
                self._path.count(batch, self._counters)
                out = self._path.read(batch)
            except NO_ROOM as error:
                raise self._room.error(error, len(batch.addresses)) from error
            self._order.after_read()
            return out

    def backward(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        weights_too: bool,
        frozen: frozenset[int] = frozenset(),
    ) -> torch.Tensor | None:
        """Take one step from the gradient of a batch's output, flat. Return the gradient of its
        weights [N], if asked for. Tables that were `frozen` in forward, or are now, keep their rows
        and the state of their optimizers.

        Weights have gradients in inference too, although no row is trained.
        """
        self._guard.check()
        with self._placement.reading, self._guard.failing_together():
            batch = self.current(batch)
            if self._gradients.trains:
                self._freeze(frozen | self.frozen_tables())
            if self._checked_features is not None:
                where = f"rank {self.rank}, step {self.steps + 1}"
                check_finite(batch, grad, self._checked_features, where)
            try:
                return self._backward(batch, grad, weights_too)
            except NO_ROOM as error:
                raise self._room.error(error, len(batch.addresses)) from error

    def _backward(
        self, batch: PreparedBatch, grad: torch.Tensor, weights_too: bool
    ) -> torch.Tensor | None:
        if self._gradients.trains and batch.rows is None:
            read = (batch.addresses, batch.segment_offset, batch.offsets, batch.weights)
            sort = self._sorter.sort(*read, batch.features, at_once=True, report=batch.report)
            batch = replace(batch, sort=sort)
        if not self._path.needs.rows:
            self._count_distinct(batch)
        with self._path.backward(batch, grad, self._counters) as passed:
            return self._take_step(*passed, weights_too)

    def _take_step(
        self, batch: PreparedBatch, grad: torch.Tensor, weights_too: bool
    ) -> torch.Tensor | None:
        self._order.before_read(self._path.needs.shared_fetch)
        weight_grad = self._path.weight_gradients(batch, grad) if weights_too else None
        self._order.after_read()
        if self._gradients.trains:
            if self._frozen:
                batch = self._without_frozen(batch)
            self._order.before_write()
            self._gradients.step(batch, grad)
            self._order.after_write()
        return weight_grad

    def _freeze(self, frozen: frozenset[int]) -> None:
        """Freeze these tables and no others; ranks compare them when rows are updated. Raise
        OperError if one of the tables is in the tier."""
        if frozen == self._frozen:
            return
        names = tuple(self._features.name_of(table) for table in sorted(frozen))
        if in_tier := [table for table in frozen if self._features.in_tier(table)]:
            raise OperError(
                f"table {self._features.name_of(min(in_tier))!r}: expected a trained table in the "
                "tier, got a frozen one (requires_grad is False): freeze it before the model is "
                "sharded, or plan without the tier"
            )
        if self._gradients.captured is not None:  # its settings are not compared in each step
            self._node.agree_on(dict.fromkeys(names, "frozen"), "the frozen tables")
        self._frozen, self._gradients.frozen = frozen, names

    def _without_frozen(self, batch: PreparedBatch) -> PreparedBatch:
        """Return a batch whose accesses are sorted, without those of frozen tables."""
        features = self._features.without_gradients(batch.features, self._frozen)
        read = (batch.addresses, batch.segment_offset, batch.offsets, batch.weights)
        sort = self._sorter.sort(*read, features, at_once=True, report=batch.report)
        return replace(batch, features=features, sort=sort)

    def _count_distinct(self, batch: PreparedBatch) -> None:
        """Count distinct rows, when the rows are needed: earlier they may still be being sorted."""
        rows = batch.rows
        # Not by the number of sorted accesses, which the host does not know for a device's batch.
        if rows is None or not (self._all_trained or self._path.needs.rows):
            return
        if self._on_device:
            self._counters.add_later(rows.before[-1:].clone(), _distinct_rows)
        else:
            self._counters.add(distinct_rows=len(rows))


def _distinct_rows(rows: np.ndarray) -> dict[str, int]:
    return {"distinct_rows": int(rows[0])}
