"""Judgements and drifts for tests of texts, made of steps and of the losses of tables."""

from collections.abc import Sequence

import numpy as np

from oper.plan.reference_figures import HeldOutSource
from oper.planner.replan.drift import Drift, HotSet, HotSets, RankSeconds, TableDrift
from oper.planner.replan.judgement import Candidate, Choice, Judgement


def a_judgement(
    keep: float,
    replan: float,
    fresh: float,
    copies: float | None = None,
    *,
    threshold: float = 0.05,
    source: HeldOutSource | None = HeldOutSource.LATER_PART,
    reservation: str = "",
) -> Judgement:
    """Return a judgement of plans whose steps take so many seconds, of which a half are
    transfers."""
    moved = {Choice.KEEP: (0.0, 0.0), Choice.REPLAN: (3e4, 2e-6), Choice.FROM_SCRATCH: (2e6, 1e-4)}
    steps = {Choice.KEEP: keep, Choice.REPLAN: replan, Choice.FROM_SCRATCH: fresh}
    if copies is not None:
        steps[Choice.FULL_COPIES] = copies
    found = [
        Candidate(choice, step, step / 2, *moved.get(choice, (8e6, 1e-3)))
        for choice, step in steps.items()
    ]
    return Judgement(source, 1000, reservation, 10_000, threshold, tuple(found))


def a_table(name: str, lost: float) -> TableDrift:
    """Return the drift of a table that loses so many seconds on the mean rank."""
    return TableDrift(
        table=name,
        slowest_rank_seconds=2e-6,
        mean_seconds=1e-6 + lost,
        fresh_mean_seconds=1e-6,
        lookups_dob=0.5,
    )


def a_drift(
    now: float, tables: Sequence[TableDrift] = (), threshold: float = 0.05, ranks: int = 4
) -> Drift:
    """Return the drift of a plan whose step takes `now` seconds, and 1e-5 when it is replanned."""
    hot = HotSet(rows=5, then=0.5, now=0.4, hottest_now=0.45)
    fresh = np.full(ranks, 1e-5)
    return Drift(
        judgement=a_judgement(now, 1e-5, 1.1e-5, threshold=threshold),
        made_step_seconds=9e-6,
        rank_seconds=RankSeconds(np.full(ranks, 9e-6), np.append(fresh[1:], now), fresh),
        hot_set=HotSets(hot, hot),
        tables=tuple(tables),
    )
