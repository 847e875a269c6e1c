"""The architecture that the packages state in their first lines: layers, no circles, sizes.

Imports are read from the source, those inside functions, under TYPE_CHECKING, and by
`import_module` included.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# From the ground up: a package imports only what stands on the lines before its own.
LAYERS = (
    "base",
    "files",
    "checkpoint tables topology",
    "cost logs.batches",
    "logs.formats",
    "logs",
    "plan",
    "profiling",
    "analysis",
    "synth checker",
    "planner.problem",
    "planner.lp",
    "planner.class_placement",
    "planner.bounds",
    "planner.row_placement planner.baselines",
    "planner",
    "planner.replan.migration",
    "planner.replan",
    "report.charts",
    "report",
    "runtime.comm",
    "runtime.tables",
    "runtime.memory",
    "runtime.allreduce",
    "runtime.fetch_paths",
    "runtime.step",
    "runtime.migration",
    "runtime",
    "scheduler",
    "scheduler.training scheduler.loader",
    "measure torchrec",
    "torchrec.planning diagnosis monitoring",
    "cli.shared",
    "cli.profile_commands",
    "cli.plan_commands",
    "cli",
)
FLOOR = {name: number for number, line in enumerate(LAYERS) for name in line.split()}
# What may never be reached, whatever stands between.
NEVER = (
    ("runtime", "planner"),
    ("planner", "runtime"),
    ("logs", "planner"),
    ("checker", "planner"),
    ("checker", "runtime"),
    ("runtime", "scheduler"),
    ("planner", "scheduler"),
    ("report", "runtime"),
    ("checkpoint", "runtime"),
)
# Who may read what links and the AllReduce cost: the rest asks oper.cost what rows cost.
LINK_COSTS = {"link_cost", "allreduce_bandwidth", "exchange_seconds", "seconds_by_kind"}
READS_LINK_COSTS = (
    "cost",
    "topology",
    "measure",
    "analysis",
    "cli",
    "report",
)  # priced, stated, measured, displayed
# TorchRec's planner has bandwidths of its own, into and from which they are translated; the checker
# of plans shares no rule with what it checks.
TRANSLATE_OR_CHECK = {
    "oper.checker.check",
    "oper.planner.baselines.torchrec_planner",
    "oper.torchrec.planning.planner_inputs",
}


@cache
def modules() -> dict[str, Path]:
    """All modules of the package by name."""
    found = {}
    for path in sorted((REPOSITORY / "oper").rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# Summaries stand above what they speak of; `oper/__init__.py`, the front door, names their module,
# as it does those of all public names.
LOADS_WHAT_IT_IS_TOLD = {"oper", "oper.base.display"}


def loaded_by_name(module: str, call: ast.Call) -> list[str]:
    """The modules that a call loads by their names: `import_module("oper.NAME")`, or all of a
    package with `import_module(f"oper.PACKAGE.{name}")`. Other names cannot be read here."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if isinstance(call.func, ast.Name):
        function = call.func.id
    if function not in ("import_module", "__import__") or module in LOADS_WHAT_IT_IS_TOLD:
        return []
    (given,) = call.args
    if isinstance(given, ast.Constant):
        return [str(given.value)] if given.value in modules() else []
    assert isinstance(given, ast.JoinedStr), f"{module}, line {call.lineno}: loads what?"
    first = given.values[0]
    assert isinstance(first, ast.Constant), f"{module}, line {call.lineno}: loads what?"
    below = str(first.value)
    return [known for known in modules() if known.startswith(below) and known != module]


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the package; the package's own face (`oper`) is no module."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = []
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [module if module in known else node.module for module in inside]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call):
                targets = loaded_by_name(name, node)
            found[name] |= {t for t in targets if t.startswith("oper.")} - {name}
    del found["oper"], found["oper.__main__"]  # the front doors
    return found


def package(module: str) -> str:
    """The package, below `oper`, of a module."""
    is_package = modules()[module].name == "__init__.py"
    return (module if is_package else module.rpartition(".")[0]).removeprefix("oper.")


def reached(start: str) -> set[str]:
    """All modules that a module imports, directly or not."""
    seen: set[str] = set()
    left = [start]
    while left:
        for target in imports()[left.pop()] - seen:
            seen.add(target)
            left.append(target)
    return seen


def test_every_package_has_a_layer_and_imports_only_lower_ones() -> None:
    wrong = []
    for module, targets in imports().items():
        for target in targets:
            mine, its = package(module), package(target)
            if mine != its and FLOOR[mine] <= FLOOR[its]:
                wrong.append(f"{module} -> {target}")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_imports_the_front_door() -> None:
    wrong = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "oper":
                named = [a.name for a in node.names if f"oper.{a.name}" not in modules()]
                named = [name for name in named if name != "__version__"]
            elif "oper" not in named:
                continue
            wrong += [f"{module}: {name}" for name in named]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    circles = [module for module in imports() if module in reached(module)]
    assert not circles, circles


@pytest.mark.parametrize(("above", "below"), NEVER)
def test_what_must_not_know_each_other_does_not(above: str, below: str) -> None:
    wrong = [
        f"{module} -> {target}"
        for module in imports()
        if module.startswith(f"oper.{above}")
        for target in reached(module)
        if target.startswith(f"oper.{below}")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_cost_topology_measuring_and_display_read_link_costs() -> None:
    allowed = tuple(f"oper.{name}" for name in READS_LINK_COSTS)
    wrong = []
    for module, path in modules().items():
        if module in TRANSLATE_OR_CHECK or module.startswith(allowed):
            continue
        wrong += [
            f"{module}, line {node.lineno}: .{node.attr}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr in LINK_COSTS
        ]
        costs = {"oper.topology.links", "oper.topology.latency"} & {*imports().get(module, ())}
        wrong += [f"{module} imports {each}" for each in costs]
    assert not wrong, "\n".join(wrong)


def test_every_package_says_what_comes_in_what_goes_out_and_what_it_imports() -> None:
    wrong = []
    for module, path in modules().items():
        if path.name != "__init__.py" or module == "oper" or module.startswith("oper.cli"):
            continue
        first = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        words = " ".join(first.split())
        if not ("In: " in words or "In and out: " in words) or "Imports: " not in words:
            wrong.append(module)
    assert not wrong, wrong
