"""scripts/gpu_check.sh, as far as it goes without a device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import build_cuda
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import (
    lookup_case,
    report,
    stage_20_build,
    stage_40_gathers,
    stage_60_lookup,
    stage_62_host_time,
    stage_64_training,
    stage_66_links,
)
from tests.support.cuda.devices import Cuda, Device


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
    assert set(ends.values()) <= {"failed", "skipped"}
    assert len(list((tmp_path / "out").iterdir())) <= 6
    text = (tmp_path / "out/report.md").read_text()
    assert "| device | no nvidia-smi |" in text
    assert "failed" in text


def test_a_stage_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.stage("stage_10_inventory"), "SECONDS", 1.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sleeps"))
    (tmp_path / "sleeps").write_text("#!/bin/sh\necho '{\"what\": 1}'\nexec sleep 60\n")
    (tmp_path / "sleeps").chmod(0o755)
    first, last = list(gpu_check.run_stage("stage_10_inventory", tmp_path, 100.0))
    assert first == {"what": 1}
    assert (last["outcome"], last["why"]) == ("failed", "stopped after 1 s")


def test_missing_packages_skip_a_stage_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.stage("stage_30_copy"), "NEEDS", ("torch", "no_such_package"))
    assert list(gpu_check.run_stage("stage_30_copy", tmp_path, 100.0)) == [
        {"outcome": "skipped", "why": "not installed: no_such_package"}
    ]


def test_the_lookups_of_the_benchmark_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, small: the arguments that it makes, and the comparison with torch."""
    monkeypatch.setattr(lookup_case, "DIMS", (16,))
    found = list(stage_60_lookup.records(device="cpu", arena_bytes=1 << 20, samples_per=512))
    assert [(r["bag"], r["ids"]) for r in found] == [
        (1, "uniform"), (1, "zipf"), (20, "uniform"), (20, "zipf"),
    ]  # fmt: skip
    assert not any(r["failed"] for r in found)
    assert [r["rows"] for r in found] == [26 * 128] * 2 + [26 * 8 * 20] * 2


def test_the_steps_of_the_benchmark_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, small: the arguments that it makes, and the comparison with torch."""
    monkeypatch.setattr(lookup_case, "DIMS", (16,))
    found = list(stage_64_training.records(device="cpu", arena_bytes=1 << 20, samples_per=512))
    assert [(r["bag"], r["ids"]) for r in found] == [
        (1, "uniform"), (1, "zipf"), (20, "uniform"), (20, "zipf"),
    ]  # fmt: skip
    assert not any(r["failed"] for r in found)
    assert all(0 < r["distinct"] <= r["rows"] for r in found)


@pytest.mark.parametrize("length", [1, 20])
def test_the_step_of_one_rank_is_right(device: Device, length: int) -> None:
    if isinstance(device, Cuda):
        pytest.skip("the benchmark itself looks there")
    arena = torch.randn(300, 8)
    backward = stage_64_training.Backward(arena, "uniform", 40, length)
    backward.ops = torch.ops.oper_emulated
    backward.sort()
    assert backward.is_right(backward.step)
    before = arena.clone()
    backward.state.zero_()
    backward.step()
    found = arena.clone()
    arena.copy_(before)
    backward.state.zero_()
    backward.step_apart()
    assert torch.equal(found, arena)


def test_an_operators_error_comes_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_20_build.told_of_a_mistake() == {"an operator's error": "raised", "failed": False}
    monkeypatch.setattr(stage_20_build, "A_MISTAKE", "import os; os.kill(os.getpid(), 11)")
    found = stage_20_build.told_of_a_mistake()
    assert found == {"an operator's error": "exit -11", "failed": True}


def test_the_time_of_the_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_62_host_time, "SAMPLES", 8)
    found = list(stage_62_host_time.records("cpu", rounds=2))
    few, many = (record for record in found if "step_seconds" in record)
    assert (few["tables"], many["tables"]) == (26, 856)
    parts = ("prepare_seconds", "lookup_seconds", "train_seconds")
    assert all(record[part] > 0 for record in (few, many) for part in parts)
    functions = [record for record in found if record["tables"] == 26 and "function" in record]
    assert len(functions) == 12
    assert sum(of["profiled_seconds"] for of in functions) > 0


@pytest.mark.check
def test_own_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_66_links, "ROW_BYTES", (64,))
    (found,) = stage_66_links.records("cpu")
    assert found["bytes_per_second"] > 0


def test_the_gathers_compile(toolkit: Path, tmp_path: Path) -> None:
    assert stage_40_gathers.compiled("90", tmp_path).exists()


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


def test_a_compiler_on_the_path_may_be_a_script(tmp_path: Path, toolkit: Path) -> None:
    """Beside a script that calls the compiler elsewhere there are no libraries to link."""
    script = tmp_path / "bin/nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {toolkit / "bin/nvcc"} "$@"\n')
    script.chmod(0o755)
    assert build_cuda.toolkit_of(script) == toolkit.resolve()
    script.write_text("#!/bin/sh\nexit 1\n")
    assert build_cuda.toolkit_of(script) is None


def test_a_library_that_was_carried_along_is_kept_where_nothing_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_cuda.so"
    library.write_bytes(b"kernels")
    monkeypatch.setattr(build_cuda, "LIBRARY", library)
    monkeypatch.setattr(build_cuda, "toolkit", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    ran: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    carried, built, told = stage_20_build.records()
    assert carried == {"carried along": "device kernels", "bytes": 7}
    assert built["built"] == "extension"
    assert [command[1] for command in ran] == ["setup.py", "-X"]
    assert not told["failed"]
