"""`python -m build` makes a wheel, which works in an environment that has no checkout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.install import REPOSITORY

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel(tmp_path: Path) -> None:
    # From a copy: what lies about in a checkout is not to be in it.
    source = tmp_path / "source"
    run("git", "clone", "--quiet", REPOSITORY, source, cwd=tmp_path)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (wheel,) = (source / "dist").glob("oper-*.whl")
    folder = tmp_path / "venv"
    # Other packages are those of this environment, which are what it was built beside.
    venv.create(folder, with_pip=True)
    site = run(
        folder / "bin/python", "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path
    )
    here = run(sys.executable, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (Path(site.strip()) / "others.pth").write_text(here)
    said = run(folder / "bin/python", "-c", "import oper; print(oper.__file__)", cwd=tmp_path)
    assert said.startswith(str(folder))
    # The tests without the package beside them: `oper` can only be the wheel's.
    tests = tmp_path / "tests-alone"
    tests.mkdir()
    for part in ("tests", "scripts", "benchmarks", "examples", "docs", "pyproject.toml"):
        (source / part).rename(tests / part)
    which = ["tests/plan", "tests/cost", "tests/topology", "tests/cli", "tests/runtime/step"]
    found = run(folder / "bin/python", "-m", "pytest", "-q", *which, cwd=tests)
    assert " passed" in found
