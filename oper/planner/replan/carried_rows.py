"""An old plan's rows in a new problem: of other tables, on other ranks, links or limits.

In: a `Plan`, the `Problem`, holder sets that rows may get. Out: `CarriedRows`. New and removed
tables and ranks are put into one layout with those that stay (migration/carried_layout.py), with
which every placement of the new problem can be compared: the rows that it moves, and the cost of
that.

The START is the placement that moves least: each row stays with those of its holders that are left.
Rows that no rank has yet go to ranks with free memory, as former replicas do
(improve_placement.py), and so do copies that training cannot keep equal on the new ranks, that of
one holder staying. Then copies are given up until they are within the budget, and capacities are
kept.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, whole_dot
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges
from oper.plan.layout import Layout
from oper.plan.plan import Plan
from oper.plan.row_locator import Chunk, RowLocator
from oper.plan.row_moves import RowMoves
from oper.planner.class_placement.heterogeneous import keep_budget
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.problem import Problem
from oper.planner.replan.improve_placement import give_owners
from oper.planner.replan.migration.carried_layout import CarriedLayout, padded
from oper.planner.replan.migration.flows import Flows, net_flows
from oper.planner.replan.migration.migration_cost import (
    Migration,
    MigrationCost,
    compare_placements,
    link_bytes,
    with_gone_ranks,
)
from oper.planner.replan.migration.new_arenas import one_slot_sets
from oper.planner.replan.migration.relocate import relocate
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.tables.table import Table
from oper.topology.pooled_links import without_pooling
from oper.topology.relays import without_relays
from oper.topology.topology import Topology


class MovedLayout(NamedTuple):
    """A layout of the new tables and ranks, and how to get there."""

    layout: Layout
    moves: RowMoves
    migration: Migration


class _Finder:
    """The class of any row, with one for each width's rows of dropped tables."""

    def __init__(self, problem: Problem, carried: CarriedLayout) -> None:
        self._finder = ClassFinder(problem.profile, problem.classes)
        self._carried, self._known = carried, self._finder.classes
        self.classes = self._known + len(carried.layout.slots)

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """Return the class of each row of a chunk, int32 [n]."""
        if chunk.table < self._carried.new_tables:
            return self._finder.find(chunk)
        width = int(self._carried.layout.width_of_table[chunk.table])
        return np.full(len(chunk), self._known + width, dtype=np.int32)


@dataclass(frozen=True)
class CarriedRows:
    """The rows of a plan under the counts of a new problem, with all tables and ranks. Placements
    are rows of each of its C classes in each of the K holder `sets`."""

    problem: Problem
    topology: Topology  # as copies pass it: without relays and pooling
    sets: HolderSets  # [K] on the new ranks
    carried: CarriedLayout
    locator: RowLocator
    finder: _Finder
    counted: Ints  # of all classes, those of dropped tables last, by counted column
    column: Ints  # [K] among the locator's holder sets
    links: Floats  # seconds per byte of all ranks, reader by source
    cost: MigrationCost  # between the locator's holder sets

    @staticmethod
    def of(old: Plan, problem: Problem, candidates: HolderSets) -> "CarriedRows":
        """Return the rows of a plan without a tier, which may get the holder sets `candidates`."""
        ranks, topology = problem.ranks, without_relays(without_pooling(problem.topology))
        prices = Charges.of(problem.topology)
        carried = CarriedLayout.of(old, problem.profile.tables, candidates, prices.read_seconds)
        ranks_in_all = carried.layout.ranks
        whole = RowLocator(
            replace(old, tables=carried.tables, layout=carried.layout),
            padded(candidates, ranks_in_all),
        )
        every = whole.holder_sets
        here = every.holds[:, :ranks].any(axis=1)
        here &= ~every.holds[:, :ranks].all(axis=1) | (every.source[:, -1] == 0)
        if problem.workload.training:  # copies must be of kinds that training can keep equal
            here &= _among(every.holds[:, :ranks], candidates.holds) | (every.copies == 1)
        column = np.flatnonzero(here)
        finder = _Finder(problem, carried)
        # To and from nowhere there is nothing to copy, and nothing goes to ranks that are gone.
        links = np.zeros((ranks_in_all, ranks_in_all))
        known = Charges.of(topology).link_seconds
        links[:ranks, :-1] = with_gone_ranks(known, ranks_in_all - 1)
        return CarriedRows(
            problem,
            topology,
            HolderSets(every.source[column, :ranks], every.holds[column, :ranks]),
            carried,
            whole,
            finder,
            whole.count(finder),
            column,
            links,
            MigrationCost.by_links(every, every, links),
        )

    @property
    def by_holder_set(self) -> Ints:
        """Rows of all classes by the locator's holder sets."""
        return self.locator.by_holder_set(self.counted)

    def start(self) -> Ints | None:
        """Return the rows of the start, [C, K]; None if that exceeds a capacity."""
        problem, classes, ranks = self.problem, len(self.problem.classes), self.problem.ranks
        every, rows = self.locator.holder_sets, self.by_holder_set[:classes]
        left = np.setdiff1d(np.arange(len(every)), self.column)
        # Rows with a holder that is left keep one; any rank may have the others.
        holds = every.holds[left, :ranks]
        holds[~holds.any(axis=1)] = True
        source = np.repeat(holds.argmax(axis=1)[:, None], ranks, axis=1).astype(np.uint16)
        sets = self.sets + HolderSets(source, holds)
        counts = np.concatenate([rows[:, self.column], np.zeros_like(rows[:, left])], axis=1)
        dropped = np.concatenate([np.zeros_like(rows[:, self.column]), rows[:, left]], axis=1)
        give_owners(problem, sets, counts, dropped)
        counts = np.ascontiguousarray(counts[:, : len(self.sets)])
        keep_budget(counts, self.sets, problem.classes, problem.budget_bytes, ranks)
        return counts if keep_capacity(problem, self.sets, counts) else None

    def counts_of(self, plan: Plan) -> Ints:
        """Return the rows of a plan of the new problem, whose holder sets are among the
        candidates."""
        there = RowLocator(plan)
        finder = ClassFinder(self.problem.profile, self.problem.classes)
        return there.counts_in(self.sets, there.count(finder))

    def moving_seconds(self, counts: Ints) -> float:
        """Return a rank's mean seconds for the copies over links that lead to `counts` [C, K]."""
        flows = self._flows(counts)
        price = self.cost.seconds[flows.before, flows.after]
        return (
            float(dot(flows.rows * self._class_bytes[flows.row_class], price)) / self.problem.ranks
        )

    def link_bytes(self, counts: Ints) -> float:
        """Return the bytes over links that lead to `counts` [C, K]."""
        holds, ranks = self.locator.holder_sets.holds.astype(np.int64), self.problem.ranks
        copies = whole_dot(1 - holds[:, :ranks], holds[:, :ranks].T)
        copies[self.carried.nowhere] = 0  # there is nothing to copy
        return self._flows(counts).link_bytes(self._class_bytes, copies)

    @property
    def cost_of_moves(self) -> MigrationCost:
        """Between the holder `sets`."""
        return MigrationCost.of(self.sets, self.sets, self.topology)

    @property
    def _class_bytes(self) -> Floats:
        """Bytes of a row of each class, those of dropped tables last, of which nothing moves."""
        return np.append(self.problem.classes.m, np.zeros(len(self.carried.layout.slots)))

    def _flows(self, counts: Ints) -> Flows:
        return net_flows(self.by_holder_set, self._target(counts), self.cost)

    def _target(self, counts: Ints) -> Ints:
        """Return the rows of all classes by the locator's holder sets, those of dropped tables
        nowhere."""
        now, classes = self.by_holder_set, len(counts)
        target = np.zeros_like(now)
        target[:classes, self.column] = counts
        target[classes:, self.carried.nowhere] = now[classes:].sum(axis=1)
        return target

    def _row_bytes(self, tables: tuple[Table, ...]) -> Ints:
        """Return the bytes of a row of each table, with its optimizer state."""
        mode = self.problem.workload.mode
        return np.array([table.memory_bytes(mode) for table in tables])

    def moved(self, counts: Ints) -> MovedLayout:
        """Return the rows and slots with which each holder set has the rows of `counts` [C, K]."""
        carried, ranks, every = self.carried, self.problem.ranks, self.locator.holder_sets
        widths = np.arange(len(carried.layout.slots))
        relocation = relocate(
            carried.tables,
            self.locator,
            self.finder,
            np.concatenate([self.problem.classes.width, widths]),
            self.counted,
            self._target(counts),
            self._flows(counts),
            self.cost,
            self._row_bytes(carried.tables),
            one_slot_sets(
                HolderSets(every.source[:, :ranks], every.holds[:, :ranks]),
                self.problem.workload.training,
            ),
        )
        entries = relocation.moves.entries
        entries = entries[entries["rank"] < ranks]
        new = entries["source_rank"] == carried.nowhere
        moves, placed = RowMoves(entries[~new]), RowMoves(entries[new])
        matrix = moves.bytes_by_link(ranks, carried.nowhere).astype(np.float64)
        return MovedLayout(
            carried.cut(relocation.layout),
            moves,
            Migration(
                moves.travelling_rows,
                matrix,
                placed.changed_rows,
                float(placed.entries["bytes"].sum()),
            ),
        )

    def migration_to(self, plan: Plan) -> Migration:
        """Return the migration to another plan of the new problem, which alone decides where its
        rows are."""
        there, ranks, nowhere = RowLocator(plan), self.problem.ranks, self.carried.nowhere
        before, after = self.locator.holder_sets, padded(there.holder_sets, nowhere + 1)
        tables = self.carried.tables[: self.carried.new_tables]
        moved = compare_placements(self.locator, there, after, self._row_bytes(tables))
        cost = MigrationCost.by_links(before, after, self.links)
        matrix = link_bytes(moved.bytes, before, after, cost)[:ranks]
        new = int(self.by_holder_set[: len(self.problem.classes), nowhere].sum())
        return Migration(moved.rows - new, matrix[:, :nowhere], new, float(matrix[:, -1].sum()))


def _among(holds: NDArray[np.bool_], known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the sets whose holders [G, M] equal those of a known set."""
    same: NDArray[np.bool_] = (holds[:, None] == known[None]).all(axis=2).any(axis=1)
    return same
