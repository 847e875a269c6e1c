"""A report from files: plans' folders, a profile, and what other commands printed as JSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.files.json_file import read_json
from oper.files.storage import check_output
from oper.plan.plan import Plan, load_plan
from oper.planner.comparison import Comparison
from oper.profiling.profile import Profile
from oper.report.page import write_page
from oper.report.plan_page import Material, not_given, plan_page
from oper.report.two_plans_page import two_plans_page

Step = Callable[[str], None]


def write_report(
    plan: Plan,
    path: Path | str,
    profile: Profile | Path | str | None = None,
    compare: Comparison | Path | str | None = None,
    drift: Sequence[Path | str] = (),
    counters: Path | str | None = None,
    title: str = "",
    overwrite: bool = False,
    report: Step = lambda step: None,
) -> list[str]:
    """Write the page of a plan, as `oper report` does: `profile` is the one that the plan was made
    from; `compare` is what `oper.compare` returned, or a file with what `oper compare --json`
    printed; `drift` are files with what `oper drift --json` printed, and `counters` one with a list
    of what `oper.counters(model)` returned on each rank. Returns what was not given, and what it
    would add to the page.

    Raises OperError where `path` exists and `overwrite` is false, and where one of these is of
    another plan.
    """
    check_output(path, overwrite=overwrite)
    if profile is not None and not isinstance(profile, Profile):
        profile = Profile.open(profile, check=True)
    material = Material(
        profile,
        _comparison(compare),
        [_printed(file, "verdict", "oper drift --json") for file in drift],
        None if counters is None else _counters(counters),
    )
    page = plan_page(plan, title or f"Plan for {plan.topology.name}", material, report)
    write_page(page, Path(path), overwrite)
    return not_given(material)


def write_two_plans_report(
    folders: Sequence[Path], path: Path, overwrite: bool = False, report: Step = lambda step: None
) -> None:
    """Write the page of two plans side by side. OperError where they are for different tables."""
    check_output(path, overwrite=overwrite)
    report("plans")
    old, new = (load_plan(folder) for folder in folders)
    report("rows that moved")
    page = two_plans_page(old, new, (str(folders[0]), str(folders[1])))
    write_page(page, path, overwrite)


def _comparison(given: Comparison | Path | str | None) -> dict[str, Any] | None:
    if given is None or isinstance(given, Comparison):
        return None if given is None else given.to_json()
    return _printed(given, "runs", "oper compare --json")


def _printed(path: Path | str, key: str, command: str) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or key not in content:
        raise OperError(f"{path}: has no {key!r}; what `{command}` prints was needed")
    return content


def _counters(path: Path | str) -> list[dict[str, Any]]:
    content = read_json(path)
    if not isinstance(content, list) or not all(isinstance(rank, dict) for rank in content):
        raise OperError(
            f"{path}: a list of what `oper.counters(model)` returned on each rank was needed"
        )
    return content
