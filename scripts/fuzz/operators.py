"""Wild arguments through every operator, in a child process that may crash.

    python -m scripts.fuzz.operators [--calls N] [--seed S] [--asan FOLDER]

Each call takes valid arguments of one operator (operator_cases.py) and damages one to three of
them: dtypes, shapes, strides, values, numbers, lists. It must return or raise; a signal, or a
report of AddressSanitizer from the extension in FOLDER (make fuzz builds it), is a defect.
Arguments that callers vouch for (csrc/cpu/common/arguments.h) keep their values.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

MOST_SECONDS = 20  # of one call
# A child that has begun no call for so long hangs outside of a call: in its start, in making
# arguments, or in reporting a defect. AddressSanitizer's library takes most of a minute to load.
STILL_SECONDS = 300
_ANSWERS = (ValueError, TypeError, IndexError, RuntimeError, MemoryError, OverflowError)


def main() -> None:
    """Run as the parent: start children until all calls are made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20, help="of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asan", type=Path)
    parser.add_argument("--child", type=Path)
    asked = parser.parse_args()
    if asked.child is not None:
        _call_all(asked.child, asked.asan, asked.seed, asked.calls)
        return
    counts, defects = fuzz(asked.calls, asked.seed, asked.asan)
    for (operator, outcome), calls in sorted(counts.items()):
        print(f"{operator:28} {calls:6,} {outcome}")
    print("\n".join(defects))
    sys.exit(1 if defects else 0)


def fuzz(
    calls: int, seed: int = 0, asan: Path | None = None
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return the outcomes by operator, and the defects, each with the command that reproduces
    it."""
    counts: Counter[tuple[str, str]] = Counter()
    defects: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        log.touch()
        while True:
            done = len(log.read_text().splitlines())
            child = [sys.executable, "-m", "scripts.fuzz.operators", "--child", str(log),
                     "--calls", str(calls), "--seed", str(seed), *_with(asan)]  # fmt: skip
            status, errors = watched(child, os.environ | _sanitized(asan), log)
            lines = log.read_text().splitlines()
            if status == 0:
                break
            if len(lines) == done:
                raise RuntimeError(
                    f"the child does not start, or hangs between calls: status {status} "
                    f"{errors[-2000:]}"
                )
            operator, number, *_ = lines[-1].split()
            reason = [text for text in errors.splitlines() if "ERROR: " in text or "#1 " in text]
            defects.append(
                f"DEFECT {operator}, call {number} of seed {seed}: status {status} "
                f"{' '.join(reason[:2])[:300]}"
            )
            log.write_text("\n".join([*lines[:-1], f"{operator} {number} crashed", ""]))
    for line in lines:
        operator, _, outcome = line.split()
        counts[operator, outcome] += 1
        if outcome not in ("returned", "refused", "crashed"):
            defects.append(f"DEFECT {line}, seed {seed}")
    return counts, defects


def watched(command: list[str], environment: dict[str, str], log: Path) -> tuple[int, str]:
    """Return the status and standard error of a command, which is killed if its log stands
    still."""
    errors = log.with_name("errors")
    with (
        open(errors, "wb") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file) as child,
    ):
        size, since = -1, 0.0
        while child.poll() is None:
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
            elif time.monotonic() - since > STILL_SECONDS:
                child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.5)
    return child.returncode, errors.read_text(encoding="utf-8", errors="replace")


def _with(asan: Path | None) -> list[str]:
    return [] if asan is None else ["--asan", str(asan)]


def _sanitized(asan: Path | None) -> dict[str, str]:
    if asan is None:
        return {}
    # libstdc++ as well, whose exceptions AddressSanitizer looks for when it starts.
    libraries = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libstdc++")
    ]
    # Python and torch leak by design; impossible allocations fail, as elsewhere.
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=8192"
    return {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}


def _call_all(log: Path, asan: Path | None, seed: int, calls: int) -> None:
    """Run as the child: make the calls that the log does not have yet."""
    if asan is not None:
        _load(next(asan.rglob("_C*.so")))
    import torch

    from oper.base import native
    from scripts.fuzz.operator_cases import CASES, damaged

    ops = native.ops()
    torch.set_num_threads(2)
    done = {tuple(line.split()[:2]) for line in log.read_text().splitlines()}
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        for operator, case in CASES.items():
            for number in range(calls):
                if (operator, str(number)) in done:
                    continue
                rng = random.Random(f"{seed} {operator} {number}")
                torch.manual_seed(number)
                arguments = case()
                if number:  # the first call is of valid arguments
                    arguments = damaged(arguments, rng)
                file.write(f"{operator} {number} ")
                file.flush()  # the call may be the last
                file.write(f"{_outcome(getattr(ops, operator), arguments, number)}\n")


def _outcome(operator: Any, arguments: list[Any], number: int) -> str:
    # Ends the process even if native code does not return; the parent sees the signal.
    signal.alarm(MOST_SECONDS)
    try:
        operator(*(argument.value for argument in arguments))
    except _ANSWERS as error:
        return "refused" if number else f"refuses:{str(error).split()[0]}"
    except Exception as error:
        return type(error).__name__
    finally:
        signal.alarm(0)
    return "returned"


def _load(library: Path) -> None:
    """Make a library the extension `oper._C` of this process."""
    import torch  # noqa: F401  (which the extension is linked to)

    loader = importlib.machinery.ExtensionFileLoader("oper._C", str(library))
    spec = importlib.util.spec_from_file_location("oper._C", library, loader=loader)
    assert spec is not None
    sys.modules["oper._C"] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    main()
