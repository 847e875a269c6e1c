"""The text of a plan or a result for `print` in Python: that of the command which makes it."""

from functools import singledispatch
from typing import Any

from oper.analysis.plan_differences import PlanDifferences
from oper.analysis.plan_facts import PlanFigures
from oper.checker.findings import Findings
from oper.cli.compare_text import print_runs
from oper.cli.drift_text import print_drift, print_windows
from oper.cli.plan_commands.check_text import print_check
from oper.cli.plan_commands.diff_text import print_diff
from oper.cli.plan_commands.plan_text import print_plan
from oper.cli.replan_text import print_replan
from oper.cli.shared.console import printed
from oper.plan.plan import Plan
from oper.planner.compare import Comparison
from oper.planner.replan.drift import Drift, WindowDrift
from oper.planner.replan.replan_one_memory import Replanned

# Names of the objects in sentences, for which commands have folders.
_PLAN, _PROFILE = "the plan", "the profile"


@singledispatch
def text_of(given: Any) -> str:
    """Return the text of an object."""
    return repr(given)


@text_of.register
def _plan(plan: Plan) -> str:
    return printed(lambda: print_plan(PlanFigures.of(plan, None), "Plan", verbose=False))


@text_of.register
def _comparison(comparison: Comparison) -> str:
    return printed(lambda: print_runs([comparison], _PROFILE, verbose=False))


@text_of.register
def _drift(drift: Drift) -> str:
    return printed(lambda: print_drift(drift, _PLAN, _PROFILE))


@text_of.register
def _windows(drift: WindowDrift) -> str:
    return printed(lambda: print_windows(drift, _PLAN, _PROFILE))


@text_of.register
def _replanned(made: Replanned) -> str:
    return printed(
        lambda: print_replan(made, "the old plan", "New plan", _PROFILE, bool(made.curve))
    )


@text_of.register
def _differences(found: PlanDifferences) -> str:
    return printed(lambda: print_diff(found, "the old plan", "The new plan"))


@text_of.register
def _findings(found: Findings) -> str:
    return printed(lambda: print_check(found, "Plan"))
