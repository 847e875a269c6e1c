"""Wheels, made by pip and by `python -m build`, work where there is no checkout."""

import email
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from scripts.install import REPOSITORY


def run(*command: str | Path, cwd: Path, pythonpath: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def clone(folder: Path) -> Path:
    """Return a clone, because a wheel must not hold what lies about in a checkout. The clone gets
    the objects that the checkout keeps, so that unchanged files are not compiled again."""
    run("git", "clone", "--quiet", REPOSITORY, folder, cwd=folder.parent)
    kept = REPOSITORY / "build/objects"
    if kept.exists():
        shutil.copytree(kept, folder / "build/objects", ignore=shutil.ignore_patterns(".*"))
    return folder


@pytest.mark.check
def test_pip_makes_a_wheel_that_plans(tmp_path: Path) -> None:
    source = clone(tmp_path / "source")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", ".", "--wheel-dir=made", cwd=source)
    (wheel,) = (source / "made").iterdir()
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        requires = email.message_from_bytes(files.read(metadata)).get_all("Requires-Dist", [])
    release = ".".join(torch.__version__.split(".")[:2])
    assert f"torch=={release}.*" in requires, "the extension is built for this release alone"
    assert [name for name in names if name.endswith((".cpp", ".h", ".o"))] == []
    assert {name.split("/")[0] for name in names} == {"oper", metadata.split("/")[0]}

    site, log = tmp_path / "site", tmp_path / "log"
    run(*pip, "install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    shutil.copytree(source / "examples", log)
    loaded = "-c 'import torch, oper._C; print(oper._C.__file__)'"
    for command in (
        loaded,
        "-m oper --version",
        "-m oper profile clicks.parquet --tables clicks.tables.yaml -o profile",
        "-m oper plan profile --topology cpu:2 --batch-size 512 -o plan",
    ):
        printed = run(sys.executable, *shlex.split(command), cwd=log, pythonpath=site)
        if command == loaded:
            assert printed.startswith(str(site))
    assert (log / "plan/plan.json").exists()


@pytest.mark.slow
def test_the_wheel(tmp_path: Path) -> None:
    source = clone(tmp_path / "source")
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
