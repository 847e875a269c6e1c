"""The predicted time of each rank by kind of row: replicated, listed, striped.

In: a plan and the profile that it was made from. T is linear in rows, except for the latency of the
AllReduce (§3.2), which only replicas need: so it is the sum of the costs of the rows of each kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.holder_sets import Sums
from oper.cost.objective import evaluate
from oper.plan.memories import HOST
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.row_locator import RowLocator
from oper.planner.price_plan import problem_of
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.replan.check_tables import check_tables
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class KindTimes:
    """Parts of the transfer time in seconds, [M] each; they add up to each rank's T."""

    replicated: Floats
    listed: Floats
    striped: Floats
    in_hosts: Floats  # of rows in the hosts' memory, whatever their kind


def kind_times(plan: Plan, profile: Profile) -> KindTimes:
    """Return the time of each rank by kind of row.

    Raises OperError if the plan was not made from `profile`.
    """
    check_profile(plan, profile)
    on_devices = np.zeros((3, plan.ranks))
    in_hosts = np.zeros(plan.ranks)
    placed = (memory for memory in plan.memories if memory.tables)
    for memory, part in zip(placed, plans_of_memories(plan), strict=True):
        times = _times(part, profile.select(memory.tables))
        if memory.name == HOST:
            in_hosts = times.sum(axis=0)
        else:
            on_devices = times
    replicated, listed, striped = on_devices
    return KindTimes(replicated, listed, striped, in_hosts)


def check_profile(plan: Plan, profile: Profile) -> None:
    """Raise OperError if the plan was made from another profile."""
    check_tables(plan, profile)
    if profile.digest != plan.profile:
        raise OperError(
            f"{option('--profile')}: the plan was made from another profile of these tables; name "
            "that one, or give what `oper drift PLAN PROFILE --json` prints for a newer one as "
            f"{option('--drift')}"
        )


def _times(plan: Plan, profile: Profile) -> Floats:
    """Return seconds of replicated, listed and striped rows on each rank, [3, M], in a plan of one
    memory."""
    problem = problem_of(plan, profile)
    locator = RowLocator(plan)
    sums = _sums_by_column(locator, ClassFinder(profile, problem.classes), problem.classes.row_sums)
    sets, ranks = locator.holder_sets, plan.ranks
    column = np.arange(len(sums.rows))
    kinds = (
        (column >= ranks) & (column < len(sets)),
        column < ranks,
        column >= len(sets),
    )
    times = []
    for kind in kinds:
        of_kind = sums.by_row(partial(_masked, kind))
        cost = evaluate(
            problem.topology,
            problem.workload,
            sets,
            of_kind.by_row(lambda values: _by_holder_set(values, ranks)),
            problem.capacity_bytes,
            plan.allreduce_method if of_kind.rows[ranks : len(sets)].any() else None,
        )
        times.append(cost.rank_seconds)
    return np.array(times)


def _masked(kind: NDArray[np.bool_], values: Floats) -> Floats:
    return np.where(kind, values, 0.0)


def _sums_by_column(locator: RowLocator, finder: ClassFinder, row_sums: Sums) -> Sums:
    """Return the sums over the rows of each count column, [K + M] each, for classes with `row_sums`
    [C]."""
    columns = len(locator.holder_sets) + locator.ranks
    sums = Sums.zeros(columns, row_sums.node_bytes.shape[1])
    for chunk_class, column in _classes_and_columns(locator, finder):

        def summed(values: Floats, of: Ints = chunk_class, column: Ints = column) -> Floats:
            return np.bincount(column, values[of], minlength=columns).astype(np.float64)

        sums = sums + row_sums.by_row(summed)
    return sums


def _classes_and_columns(
    locator: RowLocator, finder: ClassFinder
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for table in range(len(locator.layout.rows)):
        for chunk in locator.chunks(table):
            yield finder.find(chunk), locator.count_column[chunk.extent]


def _by_holder_set(values: Floats, ranks: int) -> Floats:
    """Return values of count columns, [K + M], as values of holder sets, [K]: stripes go to their
    owners."""
    whole = values[: len(values) - ranks].copy()
    whole[:ranks] += values[len(values) - ranks :]
    return whole
