"""A minute of what `make fuzz` does for longer: nothing but success, or an error of one line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.fuzz import operators
from scripts.fuzz.operator_cases import CASES

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_operator_is_called() -> None:
    declared = set()
    named = dict(
        re.findall(r'(k\w+) =\s*"(\w+)\(', (REPOSITORY / "oper/csrc/schemas.h").read_text())
    )
    for path in (REPOSITORY / "oper/csrc").rglob("*.cpp"):
        text = "".join(path.read_text().split("\n"))
        for part in text.split("TORCH_LIBRARY_FRAGMENT(oper, m)")[1:]:
            body = part.split("TORCH_LIBRARY")[0]
            schemas = [piece.strip() for piece in body.split("m.def(")[1:]]
            # A schema of a name is the devices' too, and in one of their files theirs alone.
            declared |= {s.split("(")[0].strip(' "') for s in schemas if s.startswith('"')}
            common = [s.removeprefix("oper::schemas::").split(")")[0] for s in schemas]
            if path.parent.name != "device":
                declared |= {named[name] for name in common if name in named}
    # They load a library, or need one that is loaded and a device.
    declared -= {
        "load_device_library",
        "describe_device_library",
        "create_device_segment",
        "stream_is_done",
        "attach_device_segment",
        "hold_segments",
        "check_bags",
        "post_report",
        "sum_slice",
        "gather_slices",
        "mark_touched",
        "write_message",
        "take_numbers",
        "add_messages",
        "load_nvshmem_library",
        "nvshmem_unique_id",
        "nvshmem_versions",
        "start_nvshmem",
        "allocate_symmetric",
        "free_symmetric",
        "mapped_symmetric",
        "register_buffer",
        "unregister_buffer",
    }
    assert declared == set(CASES)


@pytest.mark.check
def test_wild_arguments() -> None:
    counts, defects = operators.fuzz(calls=25)
    assert not defects, "\n".join(defects)
    assert {operator for operator, _ in counts} == set(CASES)


HANGS = {
    "as it starts": "import sys, time; time.sleep(600)",
    "between calls": """
import sys, time
with open(sys.argv[sys.argv.index('--child') + 1], 'a', buffering=1) as log:
    for number in range(6):
        log.write(f'some_operator {number} returned\\n')
        time.sleep(0.4)
    log.write('some_operator 6 ')
    log.flush()
    time.sleep(600)
""",
}


@pytest.mark.check
@pytest.mark.parametrize("hangs", HANGS)
def test_a_child_that_hangs_is_ended(
    hangs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(operators, "STILL_SECONDS", 1.5)
    log = tmp_path / "log"
    log.touch()
    child = [sys.executable, "-c", HANGS[hangs], "--child", str(log)]
    began = time.monotonic()
    assert operators.watched(child, dict(os.environ), log) == (-signal.SIGKILL, "")
    assert time.monotonic() - began < 60
    # One that goes on is not, however long it takes in all.
    assert len(log.read_text().splitlines()) == (7 if hangs == "between calls" else 0)


@pytest.mark.check
@pytest.mark.parametrize("seed", [0])
def test_damaged_files(seed: int) -> None:
    # In a process of its own, whose memory it limits.
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.fuzz.files", "--count", "4000", "--seed", str(seed)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@pytest.mark.check
def test_a_signal_ends_it_and_leaves_no_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # torch makes the folder of its compiler's cache while it is imported, and keeps it.
    cache = tmp_path_factory.mktemp("cache")
    places = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    started = subprocess.Popen(
        [sys.executable, "-m", "scripts.fuzz.files", "--count", "100000"],
        cwd=REPOSITORY, env=os.environ | places,
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("*/*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.terminate()
    assert started.wait(600) != 0
    assert list(tmp_path.iterdir()) == []
