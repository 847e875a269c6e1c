"""The project's own promises: clean under its linters, one version, no paths of one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import oper

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.check
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "ruff", "check", "."], id="ruff-check"),
        pytest.param(["-m", "ruff", "format", "--check", "."], id="ruff-format"),
        pytest.param(["-m", "mypy"], id="mypy"),
        pytest.param(["scripts/lint_cpp.py"], id="clang-format-cppcheck"),
    ],
)
def test_linters_find_nothing(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=3600,  # mypy takes 40 s of a processor
    )
    assert result.returncode == 0, f"{' '.join(command)}:\n{result.stdout}{result.stderr}"


def test_changelog_opens_with_this_version() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)
    assert headings[0] == oper.__version__


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.$}-])/(?:home|root|work|Users)/\w")
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an array file
        found += [
            f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), start=1)
            if machine_path.search(line)
        ]
    assert not found, "\n".join(found)


def test_numbers_of_examples_follow_the_profile() -> None:
    """A test that sets a number of its own would not be thorough under the profile `thorough`."""
    own = [
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests").rglob("*.py")
        if re.search(r"\bmax_examples\s*=", path.read_text(encoding="utf-8"))
    ]
    assert sorted(own) == ["tests/conftest.py", "tests/support/examples.py"]


def project_files() -> list[Path]:
    """All files git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    files = [REPOSITORY / name for name in listing.stdout.split("\0") if name]
    assert files, "git lists no files"
    return [path for path in files if path.is_file()]
