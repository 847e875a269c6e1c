"""Tests of scripts/gpu_check.sh without a device."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import build_cuda
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import (
    bundle,
    device_tests,
    lookup_case,
    report,
    stage_15_build,
    stage_17_crash,
    stage_35_backward,
    timing,
)
from tests.support.cuda.device_engines import EmulatedDevice
from tests.support.cuda.devices import Cuda, Device

# Stages whose records are outcomes of tests/cuda, and stages that need a process of their own.
OF_TESTS = ("stage_20_torchrec", "stage_25_graphs", "stage_65_kernels", "stage_70_ranks")
APART = ("stage_60_nvshmem",)  # NVSHMEM starts once in a process


@pytest.mark.check
def test_without_a_device_every_stage_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = ["bash", "scripts/gpu_check.sh", str(tmp_path / "out")]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        command, cwd=build_cuda.REPOSITORY, capture_output=True, text=True, env={"PATH": path}
    )
    assert done.returncode == 1, done.stderr
    lines = (tmp_path / "out/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ends = {r["stage"]: r["outcome"] for r in records if "outcome" in r}
    assert list(ends) == gpu_check.names()
    assert ends.pop("stage_10_inventory") == "ok"
    assert ends.pop("stage_17_crash") == "failed"
    text = (tmp_path / "out/report.md").read_text()
    assert "| device | no nvidia-smi |" in text
    assert "failed" in text


def test_the_limits_of_all_stages_are_eight_minutes() -> None:
    limits = [gpu_check.stage(name).SECONDS for name in gpu_check.names()]
    assert sum(limits) <= gpu_check.ALL_SECONDS == 480


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages whose work is tests find one that passes, and the crash is tried in few ways."""

    def one_passes(
        library: str | None, which: Sequence[str], dry: Sequence[str], seconds: float
    ) -> Iterator[dict[str, Any]]:
        paths = [each.removeprefix("--ignore=").partition("::")[0] for each in (*which, dry[0])]
        missing = [path for path in paths if not (build_cuda.REPOSITORY / path).exists()]
        yield {"passed": 1, "missing": missing, "failed": bool(missing)}

    monkeypatch.setattr(device_tests, "device_tests", one_passes)
    monkeypatch.setattr(stage_17_crash, "FLAGS", {})
    monkeypatch.setattr(stage_17_crash, "TRY_SECONDS", 600.0)
    monkeypatch.setattr(lookup_case, "INPUTS", 1)


@pytest.mark.check
@pytest.mark.parametrize("name", [name for name in gpu_check.names() if name not in APART])
def test_a_dry_run_reaches_every_stage(quick: None, emulated: Path, name: str) -> None:
    found = list(gpu_check.stage(name).records(str(emulated)))
    assert found
    assert not any(record.get("failed") for record in found), found


@pytest.mark.check
def test_a_dry_run_of_processes(
    emulated_nvshmem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["stage_10_inventory", *APART]
    monkeypatch.setattr(gpu_check, "names", lambda: names)
    assert gpu_check.main(["--dry", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").open()]
    assert {r["stage"]: r["outcome"] for r in records if "outcome" in r} == dict.fromkeys(
        names, "ok"
    )
    assert {"stage": APART[0], "NVSHMEM": "brought", "bytes": 1 << 20, "failed": False} in records


@pytest.mark.check
def test_the_tests_of_dry_runs_are_there() -> None:
    tests = [each for name in OF_TESTS for each in gpu_check.stage(name).DRY if "::" in each]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=build_cuda.REPOSITORY, capture_output=True, text=True
    )
    assert f"{len(tests)} tests collected" in done.stdout, done.stdout


def test_a_stage_that_takes_too_long_is_stopped_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.stage("stage_10_inventory"), "SECONDS", 1.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sleeps"))
    script = "#!/bin/sh\necho '{\"what\": 1}'\necho '{no record'\nsleep 60 &\nexec sleep 60\n"
    (tmp_path / "sleeps").write_text(script)
    (tmp_path / "sleeps").chmod(0o755)
    # The child has the same output, which ends once both processes are gone.
    first, last = list(gpu_check.run_stage("stage_10_inventory", tmp_path, 100.0, dry=False))
    assert first == {"what": 1}
    assert (last["outcome"], last["why"]) == ("failed", "stopped after 1 s")
    assert last["seconds"] < 30


def test_missing_packages_skip_a_stage_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.stage("stage_55_links"), "NEEDS", ("torch", "no_such_package"))
    assert list(gpu_check.run_stage("stage_55_links", tmp_path, 100.0, dry=False)) == [
        {"outcome": "skipped", "why": "not installed: no_such_package"}
    ]


def test_tests_go_on_after_one_that_ended_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest").write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*--deselect=tests/a.py::ends*) echo 'tests/a.py::last PASSED [100%]'; exit 1;;\n"
        "esac\n"
        "echo 'tests/a.py::one[x y] PASSED [ 20%]'\n"
        "echo 'tests/a.py::two FAILED [ 40%]'\n"
        "echo 'tests/a.py::three SKIPPED (why) [ 60%]'\n"
        "printf 'tests/a.py::ends '\n"
        "kill -SEGV $$\n"
    )
    (tmp_path / "pytest").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "pytest"))
    assert list(device_tests.device_tests("library", [], [], 100.0)) == [
        {"test": "tests/a.py::two", "became": "failed", "failed": True},
        {"test": "tests/a.py::ends", "became": "signal 11", "failed": True},
        {
            "passed": 2, "not passed": 1, "skipped": 1, "ended the process": 1, "all run": True,
            "failed": False,
        },
    ]  # fmt: skip


def test_tests_that_take_too_long_leave_their_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest").write_text("#!/bin/sh\necho 'tests/a.py::one PASSED'\nexec sleep 60\n")
    (tmp_path / "pytest").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "pytest"))
    seconds = device_tests.MARGIN_SECONDS + 1
    (found,) = device_tests.device_tests("library", [], [], seconds)
    assert (found["passed"], found["all run"], found["failed"]) == (1, False, True)


class FakeEvent:
    """An event that has passed if the device slept less than the `launch` cycles of the host."""

    launch = 0

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return FakeDevice.slept < FakeEvent.launch

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000.0 if self.query() else 2.0


class FakeDevice:
    """A device that stores the cycles of its last sleep."""

    slept = 0

    @staticmethod
    def sleep(cycles: int) -> None:
        FakeDevice.slept = cycles


def test_times_count_once_the_device_slept_until_all_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", FakeDevice.sleep, raising=False)
    monkeypatch.setattr(FakeEvent, "launch", 5 * timing.SLEEP_CYCLES)
    given: list[int] = []
    found = timing.timed(given.append, [1, 2, 3], torch.device("cuda"), before=lambda n: 10 * n)
    assert found == timing.Timing(seconds=0.002, spread=0.0)
    assert FakeDevice.slept == 8 * timing.SLEEP_CYCLES
    assert given[:3] == [10, 20, 30]  # each is warm
    assert set(given) == {10, 20, 30}


def test_the_spread_is_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0] * 4 + [3.0] * 4)
    monkeypatch.setattr(timing, "seconds_of", lambda *given: (next(times), True))
    found = timing.timed(lambda given: None, [0], torch.device("cpu"), runs=4)
    assert found == timing.Timing(seconds=2.0, spread=2.0)


def test_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    steps = {name: lambda given, name=name: ran.append(name) for name in "ab"}
    found = timing.timed_steps(steps, [0], lambda: None, rounds=2)
    assert "".join(ran) == "aaabbbaaabbb"
    assert set(found) == {"a", "b"}


@pytest.mark.parametrize("length", [1, 20])
def test_the_step_of_one_rank_is_right(device: Device, emulated: Path, length: int) -> None:
    if isinstance(device, Cuda):
        pytest.skip("the benchmark itself looks there")
    arena, state, grad = torch.randn(300, 8), torch.zeros(300, 1), torch.randn(40, 26 * 8)
    on = EmulatedDevice(str(emulated))
    backward = stage_35_backward.Backward(on, arena, state, grad, "uniform", length)
    backward.sort()
    assert not backward.is_right(lambda: None)
    assert backward.is_right(backward.step)
    before = arena.clone()
    backward.state.zero_()
    backward.step()
    found = arena.clone()
    arena.copy_(before)
    backward.state.zero_()
    backward.step_apart()
    assert torch.equal(found, arena)


def test_a_process_that_ends_is_told_from_an_error_that_is_raised() -> None:
    assert stage_17_crash.try_code("it", "print('raised')") == {
        "try": "it", "exit": 0, "raised": True, "failed": False,
    }  # fmt: skip
    ended = stage_17_crash.try_code("it", "import os; os.kill(os.getpid(), 11)")
    assert ended == {"try": "it", "exit": -11, "raised": False, "failed": True}


def test_the_report_has_a_table_for_records_of_equal_fields() -> None:
    records: list[dict[str, Any]] = [
        {"stage": "a", "x": 1, "y": 0.123456},
        {"stage": "a", "x": 2, "y": 2e9},
        {"stage": "a", "z": "there"},
        {"stage": "a", "outcome": "ok", "seconds": 1.5},
        {"stage": "b", "outcome": "skipped", "why": "not installed: c"},
    ]
    assert report.markdown(records, {"a": "First", "b": "Second"}).splitlines() == [
        "# GPU check", "",
        "## First", "ok in 1.5 s.", "",
        "| x | y |", "| --- | --- |", "| 1 | 0.1235 |", "| 2 | 2e+09 |", "",
        "| z |", "| --- |", "| there |", "",
        "## Second", "skipped: not installed: c.",
    ]  # fmt: skip


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A checkout with a bundle of a package and of OPER's libraries."""
    package, files = tmp_path / "site/carried", tmp_path / "checkout/.gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("number = 41\n")
    (package / "zeros.so").write_bytes(b"code" + bytes(1 << 20) + b"code")
    files.mkdir(parents=True)
    bundle.archive(tmp_path / "site", files / bundle.ARCHIVE)
    assert (files / bundle.ARCHIVE).stat().st_size < 4096
    shutil.copy(Path(bundle.__file__).with_name("on_device.sh"), files)
    for name in ("_cuda.so", "_C.cpython-312.so"):
        (files / name).write_text("carried")
    (tmp_path / "checkout/oper").mkdir()
    (tmp_path / "checkout/oper/_cuda.so").write_text("built here")
    return tmp_path / "checkout"


def on_device(checkout: Path, path: str = os.environ["PATH"]) -> "subprocess.CompletedProcess[str]":
    """Unpack a bundle, and import the package in it."""
    code = (
        "import carried, pathlib; whole = pathlib.Path(carried.__file__).with_name('zeros.so'); "
        "print(carried.number, whole.read_bytes() == b'code' + bytes(1 << 20) + b'code')"
    )
    command = f'set -eu; source .gpu/on_device.sh; python3 -c "{code}"'
    environment = {"PATH": path, "TMPDIR": str(checkout.parent)}
    return subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True
    )


def test_on_device_unpacks_a_bundle(carried: Path) -> None:
    done = on_device(carried)
    assert (done.stdout, done.stderr) == ("41 True\n", "")
    libraries = {path.name: path.read_text() for path in (carried / "oper").iterdir()}
    assert libraries == {"_cuda.so": "built here", "_C.cpython-312.so": "carried"}
    (site,) = carried.parent.glob("oper-gpu-site-*")
    (site / "carried/__init__.py").write_text("number = 42\n")
    assert on_device(carried).stdout == "42 True\n"  # unpacked once


def test_on_device_unpacks_without_xz(carried: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tar").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bin/tar").chmod(0o755)
    done = on_device(carried, f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (done.stdout, done.stderr) == ("41 True\n", "")


def test_on_device_unpacks_the_bundle_that_is_there_now(carried: Path) -> None:
    """A damaged one is named, and leaves nothing that a later one is taken for."""
    archive = carried / ".gpu" / bundle.ARCHIVE
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-100])
    done = on_device(carried)
    assert done.returncode == 1
    assert "on_device.sh: .gpu/gpu-site.tar.xz is damaged: carry it again\n" in done.stderr
    archive.write_bytes(whole)
    assert on_device(carried).stdout == "41 True\n"


@pytest.mark.check
def test_a_bundle_has_the_extension(tmp_path: Path) -> None:
    bundle.build_extension(Path(sys.executable), tmp_path / "build", tmp_path)
    (extension,) = tmp_path.glob("_C*.so")
    assert b"PyInit__C" in extension.read_bytes()


def test_the_python_of_a_bundle_is_that_of_the_device(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for printed, refused in {
        "3.12\\n2.11.0+cu130": None,
        "3.12\\n2.1.1": "got PLACE: Python 3.12, torch 2.1.1",
        "3.12": "got PLACE: Python 3.12, torch missing",
        "3.11\\n2.11.0": "got PLACE: Python 3.11, torch 2.11.0",
    }.items():
        python.write_text(f'#!/bin/sh\nprintf "{printed}\\n"\n')
        python.chmod(0o755)
        if refused is None:
            bundle.check_python(python)
            continue
        with pytest.raises(SystemExit) as refusal:
            bundle.main([str(tmp_path / "out"), "--python", str(python)])
        expected = "bundle: --python: expected Python 3.12 with torch 2.11, "
        assert str(refusal.value) == expected + refused.replace("PLACE", str(python))
    with pytest.raises(SystemExit, match=r"got .*nowhere \(No such file or directory\)"):
        bundle.check_python(tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [[], ["--dry"], ["OUT", "--dry"], ["--dri", "OUT"]])
def test_the_script_refuses_other_arguments(tmp_path: Path, given: list[str]) -> None:
    command = ["bash", str(build_cuda.REPOSITORY / "scripts/gpu_check.sh"), *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check.sh: expected [--dry] OUT, ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("given", [["--dry", "OUT"], ["OUT"]])
def test_the_script_passes_its_arguments_on(tmp_path: Path, given: list[str]) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(build_cuda.REPOSITORY / "scripts/gpu_check.sh")]
    done = subprocess.run(
        [*command, *given], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True
    )
    expected = [each.replace("OUT", str(tmp_path / "OUT")) for each in given]
    assert done.stdout.split() == ["-m", "scripts.gpu_check", *expected], done.stderr


def test_a_compiler_on_the_path_may_be_a_script(tmp_path: Path, toolkit: Path) -> None:
    """Such a script calls a compiler elsewhere; the libraries to link lie next to the compiler."""
    script = tmp_path / "bin/nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {toolkit / "bin/nvcc"} "$@"\n')
    script.chmod(0o755)
    assert build_cuda.toolkit_of(script) == toolkit.resolve()
    script.write_text("#!/bin/sh\nexit 1\n")
    assert build_cuda.toolkit_of(script) is None


def test_libraries_that_were_carried_along_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    ran: list[str] = []

    def run(*command: str) -> int:
        ran.append(command[1])
        return int(command[1] == "-c" and not fit)

    monkeypatch.setattr(stage_15_build, "run", run)
    fit = True
    assert [*stage_15_build.records(None)] == [
        {"carried along": "device kernels and extension", "failed": False}
    ]
    fit = False
    monkeypatch.setattr(build_cuda, "toolkit", lambda: Path("/toolkit"))
    assert [found["built"] for found in stage_15_build.records(None)] == [
        "extension", "device kernels",
    ]  # fmt: skip
    assert ran == ["-c", "-c", "setup.py", "scripts/build_cuda.py"]


def test_kernels_that_were_carried_along_are_kept_where_nothing_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_cuda.so"
    library.write_bytes(b"kernels")
    monkeypatch.setattr(build_cuda, "LIBRARY", library)
    monkeypatch.setattr(build_cuda, "toolkit", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(stage_15_build, "run", lambda *command: int(command[1] == "-c"))
    carried, built = stage_15_build.records(None)
    assert carried == {"carried along": "device kernels", "failed": False}
    assert (built["built"], built["failed"]) == ("extension", False)
