"""The baselines by name, for `oper compare` and for the planner's search for a better plan.

In: a name, a `Problem`. Out: `Baseline`. A new baseline is a function in a module of this package
and an entry here. Modules are imported when their baseline is made, so that the names cost nothing.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oper.planner.baselines.baseline import Baseline
    from oper.planner.problem.problem import Problem


@dataclass(frozen=True)
class Rule:
    """A baseline: the module of its function, and how it is called.

    The function takes a `Problem`, and, if `limited`, the most seconds that it may take.
    """

    module: str  # of this package
    function: str
    limited: bool = False
    package: str | None = None  # that must be installed
    # Position among the quick ones, which the planner tries; None: it takes too long for that. The
    # order decides ties, so that new baselines come last.
    quick: int | None = None
    # Most ranks on which it is a quick one; None: any number.
    quick_ranks: int | None = None
    # False if its placement says nothing about pooled tables. The exact solver's is the best by
    # costs that add up row by row, which vectors of bags do not.
    pooled: bool = True


BASELINES = {
    "paper": Rule("oper_atc24_paper", "paper", quick=4, quick_ranks=128),
    "memory_greedy": Rule("simple", "memory_greedy", quick=2),
    "access_greedy": Rule("simple", "access_greedy", quick=3),
    "table_wise": Rule("simple", "table_wise", quick=0),
    "row_wise": Rule("simple", "row_wise", quick=1),
    "torchrec": Rule("torchrec_planner", "torchrec", limited=True, package="torchrec"),
    "milp": Rule("milp_partitions", "milp", limited=True, pooled=False),
}


def installed_baselines() -> tuple[str, ...]:
    """Return the names of the baselines whose packages are installed."""
    return tuple(
        name
        for name, rule in BASELINES.items()
        if rule.package is None or find_spec(rule.package) is not None
    )


def make_baseline(name: str, problem: "Problem", limit_seconds: float) -> "Baseline":
    """Return the placement of a baseline.

    Raises:
        NoPlacementError: it has none, or none within `limit_seconds`.
        OperError: its package is not installed.
    """
    rule = BASELINES[name]
    module = importlib.import_module(f"oper.planner.baselines.{rule.module}")
    make: Callable[..., Baseline] = getattr(module, rule.function)
    return make(problem, limit_seconds) if rule.limited else make(problem)


def quick_baselines(problem: "Problem") -> "list[Baseline]":
    """Return the baselines that take no longer than a plan, in the order in which it tries them."""
    turns = {
        rule.quick: name
        for name, rule in BASELINES.items()
        if rule.quick is not None and problem.ranks <= (rule.quick_ranks or problem.ranks)
    }
    return [make_baseline(turns[turn], problem, 0.0) for turn in sorted(turns)]
