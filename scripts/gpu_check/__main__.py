"""Run all stages: python3 -m scripts.gpu_check [--dry] OUT; or one of them with --stage NAME.

A dry run reaches every stage on a machine without a device: kernels are emulated and sizes tiny.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check.report import markdown

HERE = Path(__file__).resolve().parent
LOG = "log.txt"  # the output of all stages
# Half of a quarter of an hour on a device: a failed stage can be run again in the other half.
ALL_SECONDS = 480.0
# Threads of tiny emulated kernels would only wait for each other.
IDLE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("gpu-check"))
    parser.add_argument("--dry", action="store_true", help="emulate the kernels, with tiny sizes")
    parser.add_argument(
        "--stage",
        choices=names(),
        metavar="NAME",
        help="run this stage alone, and print its records",
    )
    options = parser.parse_args(arguments)
    library = emulated_kernels() if options.dry else None
    if options.stage:
        for record in stage(options.stage).records(library):
            print(json.dumps(record), flush=True)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    records = run_all(options.out, options.dry)
    print(f"gpu_check: {options.out / 'report.md'}")
    return int(any(record.get("outcome") == "failed" for record in records))


def emulated_kernels() -> str:
    """Return the library of emulated kernels, compiled if its sources changed."""
    from tests.support.cuda.emulator import kept

    return str(kept("cuda"))


def stage(name: str) -> Any:
    return importlib.import_module(f"scripts.gpu_check.{name}")


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("stage_*.py"))


def titles() -> dict[str, str]:
    return {name: (stage(name).__doc__ or name).splitlines()[0].rstrip(".") for name in names()}


def run_all(out: Path, dry: bool) -> list[dict[str, Any]]:
    """Return the records of all stages, the last record of each with its outcome.

    records.jsonl gets each record as it comes, and report.md is rewritten after every stage.
    """
    deadline = time.monotonic() + ALL_SECONDS
    records: list[dict[str, Any]] = []
    (out / LOG).unlink(missing_ok=True)
    with open(out / "records.jsonl", "w", encoding="utf-8") as file:
        for name in names():
            for record in run_stage(name, out, deadline - time.monotonic(), dry):
                record = {"stage": name, **record}
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
            (out / "report.md").write_text(markdown(records, titles()), encoding="utf-8")
            print(f"gpu_check: {name}: {records[-1]['outcome']}", flush=True)
    return records


def run_stage(name: str, out: Path, left: float, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield the records of one stage as they come, then its outcome: ok, failed or skipped."""
    module = stage(name)
    missing = [package for package in module.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        yield {"outcome": "skipped", "why": f"not installed: {', '.join(missing)}"}
        return
    seconds = min(module.SECONDS, left)
    if seconds < 1:
        yield {"outcome": "skipped", "why": "no time was left"}
        return
    started, failed, late = time.monotonic(), False, threading.Event()
    with open(out / LOG, "a", encoding="utf-8") as log:
        print(f"==== {name}", file=log, flush=True)
        command = [sys.executable, "-m", "scripts.gpu_check", "--stage", name]
        command += ["--dry"] if dry else []
        # A session of its own: what the stage started ends with it and leaves the device.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env=os.environ | (IDLE if dry else {}),
        )  # fmt: skip
        assert process.stdout is not None

        def end() -> None:
            late.set()
            kill_all_of(process)

        killer = threading.Timer(seconds, end)
        killer.start()
        try:
            for line in process.stdout:
                if (record := record_of(line)) is not None:
                    failed |= bool(record.get("failed"))
                    yield record
            code = process.wait()
        finally:
            killer.cancel()
            kill_all_of(process)
    took = round(time.monotonic() - started, 1)
    if late.is_set():
        yield {"outcome": "failed", "seconds": took, "why": f"stopped after {seconds:.0f} s"}
    elif code:
        why = f"exit status {code}, {LOG} says why"
        yield {"outcome": "failed", "seconds": took, "why": why}
    elif failed:
        yield {"outcome": "failed", "seconds": took, "why": "by its own records"}
    else:
        yield {"outcome": "ok", "seconds": took}


def record_of(line: str) -> dict[str, Any] | None:
    """Return the record in a line of a stage's output; None if the line is another text."""
    if not line.startswith("{"):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record


def kill_all_of(process: "subprocess.Popen[str]") -> None:
    """Kill a stage and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
