"""Reports of periods as a monitor makes them, made up."""

from dataclasses import replace

import numpy as np

from oper.cost.objective import Communication
from oper.monitoring.period_report import PeriodReport
from oper.monitoring.traffic import Traffic
from oper.plan.reference_figures import HeldOutSource
from tests.support.planner.judgements import a_judgement


def a_report(period: int = 0, ranks: int = 4, worse: float | None = 0.02) -> PeriodReport:
    """A report of a period, whose plan is worse than one from scratch by so much; None: it was not
    judged."""
    random = np.random.default_rng(period)
    predicted = Traffic(
        random.uniform(900, 1000, ranks),
        np.where(np.eye(ranks, dtype=bool), 0.0, random.uniform(5e6, 6e6, (ranks, ranks))),
        Communication(3e7, 2e7, 1e6),
        0.41,
    )
    counted = replace(predicted, lookups=predicted.lookups * 1.01, replica_share=0.4)
    judgement = None
    if worse is not None:
        judgement = a_judgement(2e-5 * (1 + worse), 2e-5, 2.1e-5, source=HeldOutSource.THIS_WINDOW)
    return PeriodReport(
        period=period,
        ended=1.8e9 + period,
        last_iteration=10_000 * (period + 1),
        iterations=10_000,
        counted_iterations=156,
        samples=156 * 8192,
        accesses=156 * 8192 * 26,
        plan_batch_size=8192,
        predicted=predicted,
        counted=counted,
        judgement=judgement,
        why_not_judged="" if judgement else "no period before it to make a plan from",
    )
