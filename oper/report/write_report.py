"""Report from files: plans' folders, a profile, and the JSON of other commands."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.files.input_files import refuse_url
from oper.files.json_file import read_json
from oper.files.storage import check_output
from oper.files.what_is import what_is
from oper.plan.plan import Plan, plan_given
from oper.planner.compare import Comparison
from oper.planner.replan.drift import Drift, WindowDrift
from oper.profiling.profile import Profile, profile_given
from oper.report.charts.drift_lines import NamedDrift
from oper.report.plan_page import Material, not_given, plan_page
from oper.report.render_page import write_page
from oper.report.two_plans_page import two_plans_page

_T = TypeVar("_T")
Step = Callable[[str], None]

_NAMED = 5  # keys of JSON
_MOST = 1e30  # of a number in a file: bytes, seconds, accesses
# Figures that may be negative, if only by rounding.
_DIFFERENCES = (
    *("worse", "worse_seconds", "gain_seconds", "cost_seconds", "cost_share"),
    *("certified_gap", "solver_gap"),
)


def write_report(
    plan: Plan | Path | str,
    path: Path | str,
    profile: Profile | Path | str | None = None,
    compare: Comparison | Sequence[Comparison] | Path | str | None = None,
    drift: Path | str | Sequence[Path | str] = (),
    counters: Path | str | None = None,
    title: str = "",
    overwrite: bool = False,
    report: Step = lambda step: None,
) -> list[str]:
    """Write a page that explains a plan, as `oper report` does; a plan may be given by its folder.

    profile: the one that the plan was made from. compare: the result of `oper.compare`, or a file
    with the output of `oper compare --json`. drift: files with the output of `oper drift --json`.
    counters: a file with a list of the results of `oper.counters(model)` on each rank. Returns the
    missing arguments, each with the part of the page that it would add.

    Raises OperError if `path` exists and `overwrite` is false, or if an argument is of another
    plan.
    """
    folder = None if isinstance(plan, Plan) else str(plan)
    plan = plan_given("write_report", "plan", plan)
    drifts = [drift] if isinstance(drift, str | Path) else drift
    compared = compare if isinstance(compare, str | Path) else None
    _refuse_inputs(Path(path), [compared, *drifts, counters])
    check_output(path, overwrite=overwrite)
    material = Material(
        None if profile is None else profile_given("write_report", profile),
        _runs(compare),
        [_drift(file) for file in drifts],
        None if counters is None else _counters(counters),
    )
    page = plan_page(plan, title or f"Plan for {plan.topology.name}", material, report, folder)
    write_page(page, Path(path), overwrite)
    return not_given(material)


def write_two_plans_report(
    folders: Sequence[Path], path: Path, overwrite: bool = False, report: Step = lambda step: None
) -> None:
    """Write the page of two plans side by side; raise OperError if they are for different
    tables."""
    check_output(path, overwrite=overwrite)
    report("plans")
    old, new = (Plan.load(folder) for folder in folders)
    report("rows that moved")
    page = two_plans_page(old, new, (str(folders[0]), str(folders[1])))
    write_page(page, path, overwrite)


def _runs(
    given: Comparison | Sequence[Comparison] | Path | str | None,
) -> Sequence[Comparison]:
    if given is None or isinstance(given, Comparison):
        return [] if given is None else [given]
    if not isinstance(given, str | Path):
        return given

    def read(content: dict[str, Any]) -> list[Comparison]:
        return [Comparison.from_json(run) for run in content["runs"]]

    return _printed(given, _COMPARE, read)


def _drift(path: Path | str) -> NamedDrift:
    def read(content: dict[str, Any]) -> NamedDrift:
        kind = WindowDrift if "windows" in content else Drift
        plan, profile = str(content["plan_digest"]), str(content["profile"])
        return NamedDrift(profile, kind.from_json(content), plan)

    return _printed(path, _DRIFT, read)


def _counters(path: Path | str) -> list[dict[str, Any]]:
    return _printed(path, _COUNTERS, lambda content: content)


class _Kind(NamedTuple):
    """A kind of file that an option takes: its origin, the command that makes one, and its test."""

    name: str
    made_by: str
    remedy: str
    fits: Callable[[Any], Any]


_COMPARE = _Kind(
    "compare",
    "what `oper compare --json` printed",
    "`oper compare PROFILE --topology NAME --json > FILE`",
    lambda content: isinstance(content, dict) and content.get("runs"),
)
_DRIFT = _Kind(
    "drift",
    "what `oper drift --json` printed",
    "`oper drift PLAN PROFILE --json > FILE`",
    lambda content: isinstance(content, dict) and content.get("verdict"),
)
_COUNTERS = _Kind(
    "counters",
    "a list of what `oper.counters(model)` returned on each rank",
    "json.dump the list that all ranks gather",
    lambda content: (
        isinstance(content, list) and content and all(isinstance(r, dict) and r for r in content)
    ),
)


def _printed(path: Path | str, kind: _Kind, read: Callable[[Any], _T]) -> _T:
    """Return the result of `read` on the JSON of a file; raise OperError if the file is of another
    kind."""

    def refuse(got: str) -> OperError:
        return OperError(
            f"{option(f'--{kind.name}')} {path}: expected {kind.made_by}, got {got}: {kind.remedy}"
        )

    if not Path(path).is_file():
        refuse_url(path)
        raise refuse(what_is(path))
    try:
        content = read_json(path)
    except OperError as error:
        reason = str(error).removeprefix(str(path)).lstrip(":, ")
        raise refuse(f"a file that cannot be read as JSON ({reason})") from error
    if not kind.fits(content):
        others = (other for other in (_COMPARE, _DRIFT, _COUNTERS) if other.fits(content))
        raise refuse(next((other.made_by for other in others), _described(content)))
    _check_numbers(path, content)
    try:
        return read(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise refuse(
            f"what another version prints, or what was changed ({type(error).__name__}: {error})"
        ) from error


def _described(content: Any) -> str:
    if isinstance(content, dict) and content:
        return f"JSON with {', '.join(map(repr, list(content)[:_NAMED]))}"
    return "other JSON" if content else "empty JSON"


def _check_numbers(path: Path | str, content: Any, key: str = "") -> None:
    """Raise OperError if a number is not finite, or negative without being a difference."""
    if isinstance(content, dict):
        for name, value in content.items():
            _check_numbers(path, value, name)
    elif isinstance(content, list):
        for value in content:
            _check_numbers(path, value, key)
    elif isinstance(content, int | float):
        least = -_MOST if key in _DIFFERENCES else 0
        if not least <= content <= _MOST:
            raise OperError(f"{path}: {key} is {content}; the file was changed: write it again")


def _refuse_inputs(path: Path, inputs: Sequence[Path | str | None]) -> None:
    """Raise OperError if a page would replace one of its inputs."""
    target = path.resolve()
    if any(given is not None and Path(given).resolve() == target for given in inputs):
        raise OperError(f"{path}: is what the report is made of; choose another path")
