"""Judgements for tests of texts, made of the steps of their candidates."""

from oper.plan.reference_figures import HeldOutSource
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
