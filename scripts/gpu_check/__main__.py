"""Runs all stages: python3 -m scripts.gpu_check OUT, or one of them with --stage NAME."""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check.report import markdown

HERE = Path(__file__).resolve().parent
LOG = "log.txt"  # what all stages printed
ALL_SECONDS = 460.0  # of all stages: what is left of 8 minutes beside a machine's own start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("gpu-check"))
    parser.add_argument("--stage", help="run this one alone, here, and print its records")
    given = parser.parse_args(arguments)
    if given.stage:
        for record in stage(given.stage).records():
            print(json.dumps(record), flush=True)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    records = run_all(given.out)
    (given.out / "report.md").write_text(markdown(records, titles()), encoding="utf-8")
    print(f"gpu_check: {given.out / 'report.md'}")
    return int(any(record.get("outcome") == "failed" for record in records))


def stage(name: str) -> Any:
    return importlib.import_module(f"scripts.gpu_check.{name}")


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("stage_*.py"))


def titles() -> dict[str, str]:
    return {name: (stage(name).__doc__ or name).splitlines()[0].rstrip(".") for name in names()}


def run_all(out: Path) -> list[dict[str, Any]]:
    """The records of all stages, each with its stage; a last one of each says how it ended."""
    deadline = time.monotonic() + ALL_SECONDS
    found: list[dict[str, Any]] = []
    (out / LOG).unlink(missing_ok=True)
    with open(out / "records.jsonl", "w", encoding="utf-8") as file:
        for name in names():
            for record in run_stage(name, out, deadline - time.monotonic()):
                record = {"stage": name, **record}
                found.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
            print(f"gpu_check: {name}: {found[-1]['outcome']}", flush=True)
    return found


def run_stage(name: str, out: Path, left: float) -> Iterator[dict[str, Any]]:
    """The records of one stage as they come, and last how it ended: ok, failed or skipped."""
    found = stage(name)
    missing = [package for package in found.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        yield {"outcome": "skipped", "why": f"not installed: {', '.join(missing)}"}
        return
    seconds = min(found.SECONDS, left)
    if seconds < 1:
        yield {"outcome": "skipped", "why": "no time was left"}
        return
    started, failed = time.monotonic(), False
    with open(out / LOG, "a", encoding="utf-8") as log:
        print(f"==== {name}", file=log, flush=True)
        command = [sys.executable, "-m", "scripts.gpu_check", "--stage", name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        killer = threading.Timer(seconds, process.kill)
        killer.start()
        for line in process.stdout:
            if line.startswith("{"):
                record = json.loads(line)
                failed |= bool(record.get("failed"))
                yield record
        code = process.wait()
        late = not killer.is_alive()
        killer.cancel()
    took = round(time.monotonic() - started, 1)
    if late:
        yield {"outcome": "failed", "seconds": took, "why": f"stopped after {seconds:.0f} s"}
    elif code:
        why = f"exit status {code}, {LOG} says why"
        yield {"outcome": "failed", "seconds": took, "why": why}
    elif failed:
        yield {"outcome": "failed", "seconds": took, "why": "by its own records"}
    else:
        yield {"outcome": "ok", "seconds": took}


if __name__ == "__main__":
    sys.exit(main())
