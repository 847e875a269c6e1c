"""The engine: all tables of a module as one distributed shared memory, and a training step on it.

The paper's §5, on one rank of M. An engine is made of

    heap        rows and optimizer state of the node's ranks (memory/heap.py)
    path        the ways in which the rows of each table reach the ranks that read them
                (fetch_paths/fetch_path.py), chosen once (fetch_paths/choose_path.py)
    preparer    ids to addresses, and accesses sorted by row (step/prepare_batch.py)
    operator    the lookup that autograd and torch.compile see; how a training step goes from here
                to the kernels and back is described there (step/lookup_op.py)
    gradients   sums, exchange and updates of a step (step/apply_gradients.py)
    table_io    rows by id, for initial values and checkpoints (table_io.py)
    guard       refuses use after a fork or close, and makes all ranks fail together
                (comm/engine_lifetime.py)
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.allreduce import node_sum
from oper.plan.layout import Layout
from oper.plan.plan import Plan
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.replica_allreduce import (
    BucketReplicas,
    NoReplicas,
    ReplicaAllReduce,
)
from oper.runtime.allreduce.replica_check import UnequalReplica, unequal_replicas
from oper.runtime.comm.engine_lifetime import EngineGuard
from oper.runtime.comm.exchange import COUNTERS as EXCHANGE_COUNTERS
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.choose_path import choose_path
from oper.runtime.fetch_paths.relayed_rows import COUNTERS as RELAY_COUNTERS
from oper.runtime.fetch_paths.row_source import HeapPlaces, MakeSource, source_of_tier
from oper.runtime.memory import runtime_plan
from oper.runtime.memory.alike_devices import check_alike
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.heap import Heap, TableMemory, check_memory
from oper.runtime.memory.placement import Placement
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.memory.step_room import StepRoom
from oper.runtime.migration.changed_rows import ChangedRows, changed_rows
from oper.runtime.migration.row_migration import RowMigration, check_room
from oper.runtime.migration.schedule import Schedule, SlotPool
from oper.runtime.step.apply_gradients import COUNTERS, Gradients
from oper.runtime.step.device_signals import DeviceSignals
from oper.runtime.step.equal_settings import EqualSettings
from oper.runtime.step.fixed_rows import FixedRows
from oper.runtime.step.lookup_op import LookupOperator
from oper.runtime.step.node_copies import NoCopies, NodeCopies
from oper.runtime.step.prepare_batch import BatchPreparer
from oper.runtime.step.sort import Sorter
from oper.runtime.step.training_step import TrainingStep
from oper.runtime.table_io import ListedRows, RowBlock, RowRange, TableIO
from oper.runtime.tables.features import FeatureSet
from oper.runtime.tables.optimizer_buckets import Bucket, EmbeddingTable, make_buckets

BOUNDS = ("fatal", "warning", "ignore")
_NO_ROOM_TO_MOVE = "move fewer bytes in a step, or save a checkpoint and start by the new plan"


class EmbeddingEngine:
    """The tables of one module on this rank of `group`, placed by `plan`.

    `nodes` has a number for each rank: ranks of one number share memory. `bounds` is the treatment
    of ids out of range: "fatal", or "warning" or "ignore", which read row 0, as FBGEMM does.
    `gradient_scale` multiplies all gradients: TorchRec divides by the number of ranks. `device`,
    the CPU by default, has rows and batches; `spare` is the number of extra rows to reserve there
    for each rank, as a share of the rows of the rank with the most. `make_source` makes the source
    of rows of the plan's tables in the tier (row_source.py).
    """

    def __init__(
        self,
        plan: Plan,
        tables: Sequence[EmbeddingTable],
        *,
        group: dist.ProcessGroup | None = None,
        weighted: bool = False,
        bounds: str = "fatal",
        nodes: Sequence[int] | None = None,
        deadline_seconds: float = 60.0,
        gradient_scale: float | None = None,
        check_gradients: bool = False,
        device: Device | None = None,
        make_source: MakeSource | None = None,
        spare: float = 0.0,
    ) -> None:
        self.device = device or Cpu()
        _check_bounds(bounds)
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.tables, self.weighted = tuple(tables), weighted
        self.training = plan.workload.training
        self.before_use: Callable[[], None] | None = None
        self.node = Node.join(group, deadline_seconds, nodes, _first_table(plan, tables))
        self.rank, self.ranks = self.node.rank, self.node.ranks
        self.gradient_scale = 1 / self.ranks if gradient_scale is None else gradient_scale
        try:
            if self.device.kind != "cpu":
                runtime_plan.check_for_devices(plan, str(self.device.torch_device))
            check_alike(self.node, self.device)
            _check_agreement(self.node, plan, self.tables, weighted, self.gradient_scale)
            if self.device.kind != "cpu":
                runtime_plan.check_nodes(
                    Proxies(self.node).nodes, plan, str(self.device.torch_device)
                )
            self.buckets = make_buckets(plan, self.tables)
            self.features = FeatureSet(plan, self.tables, self.buckets)
            counters = (*COUNTERS, *EXCHANGE_COUNTERS, *RELAY_COUNTERS)
            self.signals = _signals(self.node, counters, self.device)
            self.counters = Counters(self.ranks, self.device)
            self._memory = memory = TableMemory.of_plan(
                self.node, plan, self.buckets, self.signals, self.device, spare
            )
            self.heap = memory.heap
            self._pool = SlotPool(plan.layout.slots)
            self._migration: weakref.ref[RowMigration] | None = None
            self._begun: RowMigration | None = None  # kept until it ends
            self.placement = Placement(plan, self.rank, self.device)
            self.table_io = TableIO(plan, self.tables, memory)
            self.source, self._in_heap = source_of_tier(make_source, plan, self.tables, memory)
            tier = (self.source, self._in_heap)
            self.path = choose_path(plan, memory, self.features, *tier, self.counters)
            self.gradients = self._make_gradients(memory)
        except BaseException as error:
            self.node.fail(error)
            self.node.close()
            raise
        self._guard = EngineGuard(
            self.node,
            self.signals,
            group,
            # Ranks of several nodes look up together, in inference too.
            waiting=self.training or len(self.node.peers) < self.ranks,
        )
        slots = _most_slots(self.buckets, plan.layout.slots)
        dims = [bucket.dim for bucket in self.buckets]
        # A batch that is not trained is read all the same: row 0 in the place of a bad id.
        fatal = self.training and bounds == "fatal"
        needs = self.path.needs
        sorter = Sorter(self.node, self.device, slots, dims, needs.rows, needs.runs, fatal)
        self._sorter = sorter
        memory_needs = (needs.messages, needs.fetched_row_bytes)
        room = StepRoom(dims, self.ranks, self.training, *memory_needs)
        self._preparer = BatchPreparer(
            self.features,
            self.placement,
            sorter,
            self.device,
            room,
            self.path,
            weighted=weighted,
            bounds=bounds,
            trains=self.training,
        )
        self.training_step = TrainingStep(
            self._guard,
            memory,
            self.placement,
            self._preparer,
            sorter,
            self.path,
            self.gradients,
            self.counters,
            room,
            self.features,
            self.features.features if check_gradients else None,
        )
        self.operator = LookupOperator(self.training_step, self.device, trained=self.training)

    @property
    def plan(self) -> Plan:
        """The engine's plan, with the rows at their present places."""
        return self.placement.plan

    def _make_gradients(self, memory: TableMemory) -> Gradients | FixedRows:
        if not self.training:
            return FixedRows(memory.heap)
        replicas, copies = self._make_allreduce(), self._make_copies()
        means = any(table.pooling == "mean" for table in self.tables)
        name = self.features.name_of
        tables = [[name(n) for n in bucket.tables] for bucket in self.buckets]
        settings = EqualSettings(self.node, tables)
        options = (self.counters, self.gradient_scale, means, settings)
        parts = (self.path, self.source, self._in_heap, replicas, copies)
        return Gradients(memory, *parts, *options)

    def _make_allreduce(self, coming: Sequence[Ints] = ()) -> ReplicaAllReduce | NoReplicas:
        """Return the AllReduce of the trained replicas, with the slots to which rows of each bucket
        are going to come."""
        of_buckets = []
        for b, bucket in enumerate(self.buckets[: self._in_heap]):
            planned = [self.tables[n].index for n in bucket.tables if bucket.trained]
            slots = runtime_plan.replica_slots(self.plan.layout, planned)
            if len(coming) and bucket.trained:
                slots = np.union1d(slots, coming[b])
            of_buckets.append(BucketReplicas(torch.from_numpy(slots), bucket.dim))
        alone = self.node.ranks == 1 and self.device.kind != "cpu"  # all rows are updated at once
        if alone or not any(len(bucket.slots) for bucket in of_buckets):
            return NoReplicas()
        plan, summed = self.plan, node_sum(self.plan.topology)
        ranks = (plan.allreduce_method, self.node, self.signals)
        return ReplicaAllReduce(*ranks, of_buckets, self.device, summed)

    def _make_copies(self) -> NodeCopies | NoCopies:
        in_heap = self.buckets[: self._in_heap]
        trained = [b for b, bucket in enumerate(in_heap) if bucket.trained]
        tables = [self.tables[n].index for b in trained for n in in_heap[b].tables]
        return NodeCopies.of(self._memory, self.plan.layout, trained, tables, self.counters)

    # A batch.

    @torch.compiler.disable  # it looks at ids and makes structs of NumPy, which no graph can
    def prepare(self, batch: Any) -> PreparedBatch:
        """Translate and sort a KeyedJaggedTensor, maybe a batch ahead of its lookup. If tables are
        pooled between nodes, all ranks prepare batches together, in one order."""
        self._guard.check()
        with self.placement.reading, self._guard.failing_together():
            return self._preparer.prepare(batch)

    def lookup(self, batch: PreparedBatch) -> torch.Tensor:
        """Return the rows of a batch, pooled: [samples, columns]; or unpooled: flat, each feature's
        [n, dim] one after another, in the order of `batch.keys`: the order of the batch that was
        prepared, if it has each feature once."""
        if self.before_use is not None:
            self.before_use()  # it has nothing to do in a step that is captured: _settled
        out = self.operator.lookup(batch)
        return out.view(batch.samples, self.features.columns) if self.features.pooled else out

    def __call__(self, batch: Any) -> torch.Tensor:
        """Prepare a batch and look it up."""
        return self.lookup(self.prepare(batch))

    # Training, if the plan is for it.

    @property
    def steps(self) -> int:
        """The number of updates of this engine."""
        return self.training_step.steps

    @property
    def optimizer_steps(self) -> int:
        """The number of updates of this engine, and of those before its checkpoint."""
        return self._trained.optimizer_steps

    @optimizer_steps.setter
    def optimizer_steps(self, value: int) -> None:
        self._trained.optimizer_steps = value

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each bucket, which may be set."""
        return self._trained.learning_rates

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold the gradients of backward passes inside back; the next one outside adds them."""
        with self._trained.accumulate():
            yield

    @property
    def _trained(self) -> Gradients:
        if isinstance(self.gradients, FixedRows):
            raise OperError(runtime_plan.NOT_FOR_TRAINING)
        return self.gradients

    # Rows that move.

    def migrate(self, plan: Plan, bytes_per_step: int) -> RowMigration:
        """Return the object whose steps move the rows to their places in another plan. To be called
        on all ranks.

        `plan` has the engine's tables by name, and maybe others. No rank copies more than
        `bytes_per_step` in a step, except for a single row. If rows are on their way to this plan
        already, the object that moves them is returned, with its own steps: its holder may have
        lost it. Raises OperError, on all ranks, if the rows cannot go there while the engine runs,
        or are still on their way to another plan.
        """
        self._guard.check()
        digest = runtime_plan.plan_digest(plan)
        asked = digest + str(bytes_per_step).encode()
        self.node.agree(asked, "the plan to migrate to and its bytes per step")
        on_its_way = self._migration() if self._migration is not None else None
        if on_its_way is not None and runtime_plan.plan_digest(on_its_way.plan) == digest:
            return on_its_way
        problem = ""
        try:
            self._check_migration(plan)
            rows = changed_rows(self.plan, plan)
            schedule = Schedule.of(rows, self._pool, self.heap.slot_bytes, bytes_per_step)
            check_room(self.heap, schedule.most_slots)
        except OperError as error:
            problem = str(error)
        self.node.check_all(problem, "say whether rows can move")
        made = RowMigration(self._guard, self._memory, self.placement, rows, schedule, plan, self)
        check_memory(
            self.node, made.extra_bytes, "moving rows", self.device.free_memory(), _NO_ROOM_TO_MOVE
        )
        self._migration = weakref.ref(made)
        if made.done:
            self._migration = None
            self.placement.planned_from(plan.profile)
        return made

    @property
    def rows_are_moving(self) -> bool:
        """True while rows are on their way to another plan."""
        return self._migration is not None and self._migration() is not None

    def rows_can_move(self) -> None:
        """Raise OperError while gradients are held back, or if an earlier batch has turned out bad.
        The migration calls this method and those that follow."""
        self._preparer.finish()
        if self.gradients.holding:
            raise OperError(
                "rows were to move while gradients of earlier batches are held back: move them "
                "after the step that takes them"
            )

    def rows_begin_to_move(self, layout: Layout, rows: ChangedRows, schedule: Schedule) -> None:
        """Prepare for rows that are about to move, and are found by `layout` from now on."""
        self._begun = self._migration() if self._migration is not None else None
        self.heap.resize(np.maximum(schedule.most_slots, self.heap.slots))
        self.placement.replace(layout)
        self._follow_layout(_coming_replicas(self, rows, schedule))

    def rows_leave(self, rows: ChangedRows, moving: Ints, schedule: Schedule) -> None:
        """Prepare reads of the rows with the numbers `moving` from their places."""
        bucket_of = np.full(len(self.plan.tables), -1, dtype=np.int64)
        for b, bucket in enumerate(self.buckets[self._in_heap :]):
            bucket_of[[self.tables[n].index for n in bucket.tables]] = b
        leaving = moving[bucket_of[rows.table[moving]] >= 0]
        if not len(leaving):
            return
        of_bucket, owner = bucket_of[rows.table[leaving]], rows.sets.holds.argmax(axis=1)
        before, after = owner[rows.before[leaving]], owner[rows.after[leaving]]
        self.source.move(
            HeapPlaces(of_bucket, before, rows.slot(leaving, before)),
            HeapPlaces(of_bucket, after, schedule.slot[leaving]),
        )

    def copies_moved(self) -> None:
        """Follow moved rows that have a copy on each node, or had: their slots identify them."""
        if self.training:
            self._trained.follow_copies(self._make_copies())

    def rows_have_moved(self, plan: Plan, schedule: Schedule) -> None:
        """Take note that all rows are at their places in this plan."""
        self._migration, self._begun, self._pool = None, None, schedule.pool
        self.heap.resize(schedule.pool.ends)
        self.placement.resized(self.heap.slots)
        self._follow_layout()
        self.placement.planned_from(plan.profile)

    def _follow_layout(self, coming: Sequence[Ints] = ()) -> None:
        """Follow the placement's layout, with the rows at their present places."""
        slots = self.heap.slots
        self.table_io = TableIO(self.plan, self.tables, self._memory)
        self._sorter.resize(_most_slots(self.buckets, slots))
        self.path.resize(slots)
        if self.training:
            self._trained.follow(self._make_allreduce(coming), self._make_copies())

    def _check_migration(self, plan: Plan) -> None:
        if self.rows_are_moving:
            raise OperError(
                "rows are on their way to a plan already: take the steps of that migration, which "
                "is given again for the same plan, and begin another once it is done"
            )
        if self.training_step.in_graphs:
            raise OperError(
                "a graph of torch.compile looks these tables up, and would not follow rows that "
                "move: leave the lookup out of it, as the sharded modules do"
            )
        runtime_plan.check_same_step(self.plan, plan)
        if self.training:
            runtime_plan.check_trainable(plan)

    # Rows of tables, for initial values and checkpoints.

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Bytes of this rank's shared memory: its heap; the rows that it fetches from other nodes
        for its own; in training its mailbox and its part of the replicas' AllReduce. All but the
        heap have the size that the largest batch so far needed."""
        own = {"heap": self.heap.bytes, "relay": self.path.shared_bytes}
        return own | self.gradients.shared_bytes

    def read_rows(
        self, requests: Sequence[RowRange | ListedRows], state: str | None = None
    ) -> list[torch.Tensor]:
        """Return rows of tables, float32 [rows, dim] each, or a state of their optimizer. To be
        called on all ranks, each with requests of its own."""
        with self._settled():
            return self.table_io.read(requests, state)

    def write_rows(self, blocks: Sequence[RowBlock], state: str | None = None) -> None:
        """Give all copies of rows of tables new values, or of a state of their optimizer. To be
        called on all ranks, each with blocks of its own."""
        with self._settled():
            self.source.forget()
            self.table_io.write(blocks, state)
            for table, first, values in blocks:
                self._touch(table, first, len(values))

    # Rows with new values, for checkpoints that have these alone.

    def begin_touched(self, new: Sequence[RowRange] = ()) -> None:
        """Mark the rows that are updated or written from now on, until `end_touched`; `new` are
        touched already. To be called on all ranks."""
        with self._settled():
            self.heap.begin_touched()
            for rows in new:
                self._touch(*rows)

    def end_touched(self) -> None:
        """Mark no rows any more."""
        self.heap.touched.end()

    def touched_rows(self, asked: Sequence[RowRange]) -> torch.Tensor:
        """Return which of the rows that this rank asks for were touched since `begin_touched`, on
        any rank and at any place: bool [rows]. To be called on all ranks, each with the rows that
        it asks for, of one table."""
        with self._settled():
            return self.table_io.touched(asked)

    def _touch(self, table: int, first: int, rows: int) -> None:
        if self.heap.touched.begun:
            self.heap.touched.set_aside(self.tables[table].index, np.arange(first, first + rows))

    @contextmanager
    def _settled(self) -> Iterator[None]:
        self._guard.check()
        if self.device.capture is not None:
            raise OperError(
                "expected rows to be read and written between steps, got it in a step that is "
                "captured: take, change and load state dicts outside of the step that "
                "oper.graph_step is given"
            )
        with self._guard.failing_together(everywhere=True):
            self._preparer.finish()
            self.source.settle()
            yield

    def unequal_replicas(self) -> list[UnequalReplica]:
        """Return the replicas whose copies, or their optimizer state, differ between ranks: none,
        unless something else wrote to the heap. To be called on all ranks; the parts are rows and
        states of each width in turn, slots count the width's replicas. In plans for training, the
        parts of rows with a copy on each node follow, in the same way, ordered by their first
        holder."""
        self.signals.barrier("compare replicas")
        layout = self.plan.layout
        parts = _replicas(self.plan, self.heap)
        unequal = unequal_replicas(parts, self.node.group)
        copied = runtime_plan.copied_to_nodes(layout) & self.training
        held = np.unique(layout.holds[copied], axis=0)
        # Those that the lowest rank holds come first.
        for n, holds in enumerate(held[::-1], 1):
            holders = np.flatnonzero(holds).tolist()
            copies = _node_copies(self.plan, self.heap, holders, self.rank in holders)
            of_copies = unequal_replicas(copies, self.node.group, holders)
            unequal += [replace(one, part=n * len(parts) + one.part) for one in of_copies]
        return unequal

    def fail(self, error: BaseException) -> None:
        """Make all ranks that wait for this one, now or later, raise for this error: also in the
        group's other engines."""
        self._guard.fail(error)

    def close(self) -> None:
        """Leave the other ranks. Memory is freed with the last reference to this engine; if kernels
        read other nodes' rows, all ranks close together, and it is freed then."""
        try:
            self.path.close()
        finally:
            self._guard.close()


def _first_table(plan: Plan, tables: Sequence[EmbeddingTable]) -> str:
    """Return the name of the first table, "" if there is none or the plan lacks it."""
    known = (plan.tables[t.index].name for t in tables if t.index < len(plan.tables))
    return next(known, "")


def _signals(node: Node, counters: Sequence[str], device: Device) -> Signals:
    if device.kind == "cpu":
        return Signals(node, counters)
    return DeviceSignals(node, counters, device)


def _check_bounds(bounds: str) -> None:
    if bounds not in BOUNDS:
        raise OperError(f"bounds: expected one of {', '.join(BOUNDS)}; got {bounds!r}")


def _check_agreement(
    node: Node,
    plan: Plan,
    tables: Sequence[EmbeddingTable],
    weighted: bool,
    gradient_scale: float,
) -> None:
    """Check that all ranks have the same plan, tables and settings, that the plan is for them, and
    that it can be trained if it is for training. For all ranks to call; OperError on all of them:
    they compare their settings before any of them checks its own."""
    node.agree(runtime_plan.plan_digest(plan), "plan")
    settings = {"weighted features": str(weighted), "gradient_scale": str(gradient_scale)}
    for number, table in enumerate(tables):
        name = plan.tables[table.index].name
        settings[f"table {number}"] = f"{name!r} of features {', '.join(table.features)}"
        settings[f"pooling of {name!r}"] = table.pooling
        for name_of_setting, value in asdict(table.optimizer).items():
            settings[f"{name_of_setting} of {name!r}"] = repr(value)
    node.agree_on(settings, "tables and optimizers")
    if node.ranks != plan.ranks:
        alone = node.group is None and not dist.is_initialized()
        raise OperError(
            f"the plan is for {plan.ranks} ranks, and {node.ranks} "
            + ("is running without a process group" if alone else "are running")
            + f"; plan for as many ({option('--topology')}), or start {plan.ranks}"
            + (" and call torch.distributed.init_process_group first" if alone else "")
        )
    if plan.workload.training:
        runtime_plan.check_trainable(plan)


def _most_slots(buckets: Sequence[Bucket], slots: Ints) -> list[int]:
    """Return the most slots of a rank in each bucket; `slots` [W, M] are those of all arenas."""
    return [int(slots[bucket.width].max()) for bucket in buckets]


def _coming_replicas(engine: EmbeddingEngine, rows: ChangedRows, schedule: Schedule) -> list[Ints]:
    """Return the slots to which rows of each bucket come as replicas."""
    copied = rows.sets.everywhere[rows.after]
    tables = [[engine.tables[n].index for n in bucket.tables] for bucket in engine.buckets]
    return [schedule.slot[copied & np.isin(rows.table, of_bucket)] for of_bucket in tables]


def _replicas(plan: Plan, heap: Heap) -> list[torch.Tensor]:
    """Return the rows and the states of this rank's replicas, of each width in turn."""
    layout, parts = plan.layout, []
    for width in range(len(layout.slots)):
        tables = np.flatnonzero(layout.width_of_table == width)
        slots = torch.from_numpy(runtime_plan.replica_slots(layout, tables))
        held = (heap.rows(width), heap.state(width))
        parts += [part[slots.to(part.device)].cpu() for part in held]
    return parts


def _node_copies(plan: Plan, heap: Heap, holders: list[int], mine: bool) -> list[torch.Tensor]:
    """Return the rows and the states of rows with copies on exactly these ranks, of each width in
    turn; as many zeros if this rank has no copies."""
    layout, parts = plan.layout, []
    for width in range(len(layout.slots)):
        tables = np.flatnonzero(layout.width_of_table == width)
        slots = torch.from_numpy(runtime_plan.node_copy_slots(layout, tables, holders[0]))
        for part in (heap.rows(width), heap.state(width)):
            zeros = torch.zeros(len(slots), part.shape[1], dtype=torch.uint8)
            parts.append(part[slots.to(part.device)].cpu() if mine else zeros)
    return parts
