"""The simulator tests the cost model, so that it must not share anything with it."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SIMULATOR = REPOSITORY / "benchmarks" / "planning" / "simulator"
FORBIDDEN = ("oper.cost", "oper.planner")


def imported(path: Path) -> set[str]:
    """All modules that a file imports, and packages that it imports names from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def file_of(module: str) -> Path | None:
    path = REPOSITORY.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


@pytest.mark.parametrize("path", sorted(SIMULATOR.glob("*.py")), ids=lambda path: path.stem)
def test_it_reaches_nothing_of_the_cost_model(path: Path) -> None:
    """Neither itself nor by what it imports of this project."""
    seen, waiting = {path}, [path]
    while waiting:
        for module in imported(waiting.pop()):
            assert not module.startswith(FORBIDDEN), f"{path.name} reaches {module}"
            file = file_of(module)
            if file is not None and file not in seen:
                seen.add(file)
                waiting.append(file)
