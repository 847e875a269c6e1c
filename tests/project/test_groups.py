"""Groups of tests: the table of `more` names tests that exist, and all places name one division."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.groups import MORE, reason_for
from tests.support.cases import repeated

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = [name for names in MORE.values() for name in names]


@pytest.mark.parametrize("names", MORE.values(), ids=MORE)
def test_more_names_tests_that_exist(names: tuple[str, ...]) -> None:
    for name in names:
        file, _, test = name.partition("::")
        path = REPOSITORY / "tests" / file
        assert path.exists(), name
        if test:
            assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), name


def test_more_names_each_test_once() -> None:
    assert len(NAMES) == len(set(NAMES))
    inside = [one for one in NAMES for of in NAMES if one.startswith((f"{of}/", f"{of}::"))]
    assert inside == []


def test_a_listed_name_covers_what_is_below_it() -> None:
    reason = next(iter(MORE))
    assert reason_for("tests/cuda/test_sort.py::test_runs") == reason
    assert reason_for("tests/cuda_like/test_sort.py::test_runs") is None
    (file,) = (name for name in NAMES if name == "logs/test_many_columns.py")
    assert reason_for(f"tests/{file}::test_any") is not None
    listed = "logs/test_hostile_logs.py::test_gzip_bombs"
    assert reason_for(f"tests/{listed}") is not None
    assert reason_for(f"tests/{listed}_of_another_kind") is None


def test_cases_that_bring_no_new_value_are_repeated() -> None:
    cases = [(nodes, method) for nodes in "ab" for method in "xyz"]
    assert repeated(cases) == [False, False, False, False, True, True]
    assert repeated([("a",), ("b",)]) == [False, False]
    assert repeated([()]) == [False]


def test_makefile_and_contributing_name_every_group() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    markers = [
        text.partition(":")[0] for text in settings["tool"]["pytest"]["ini_options"]["markers"]
    ]
    makefile = (REPOSITORY / "Makefile").read_text()
    expressions = dict(
        re.findall(r'^(test|check): .*\n\t\$\(PYTEST\) -m "(.*)"', makefile, re.MULTILINE)
    )
    assert expressions["test"].split(" and ") == [
        f"not {name}" for name in markers if name != "drawn"
    ]
    assert expressions["check"].split(" or ") == [name for name in markers if name != "slow"]
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert [name for name in markers if f"| `{name}` |" not in guide] == []


def test_the_budget_is_of_what_ci_runs() -> None:
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text()
    budget = re.findall(r"^\| `(make \w+)` \| \d+ s \|", guide, re.MULTILINE)
    commands = re.findall(r"^make \w+", (REPOSITORY / ".ci/run").read_text(), re.MULTILINE)
    assert budget == commands
