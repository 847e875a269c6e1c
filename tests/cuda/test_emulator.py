"""The emulator finds planted faults, and takes kernels without them for right in every order."""

import subprocess
from pathlib import Path

import pytest

from tests.support.cuda import emulator

PLANTED = Path(emulator.__file__).with_name("planted.cu")
ORDERS = range(12)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("planted") / "planted"
    emulator.build(program, [PLANTED], "-g1", "-fsanitize=address", shared=False)
    return program


def run(program: Path, name: str, order: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, name, str(order)], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("name", "result"), [("sum_by_halves", "2016 0"), ("write_after_read", "1 1")]
)
def test_what_is_right_is_so_in_every_order(planted: Path, name: str, result: str) -> None:
    for order in ORDERS:
        done = run(planted, name, order)
        assert (done.returncode, done.stdout.strip()) == (0, result), done.stderr


@pytest.mark.parametrize(
    ("name", "result"), [("no_barrier", "2016 0"), ("write_before_read", "1 1")]
)
def test_races_show_in_some_order(planted: Path, name: str, result: str) -> None:
    found = [run(planted, name, order).stdout.strip() for order in ORDERS]
    assert sum(out != result for out in found) >= 3, found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leave_early", "threads that wait for each other for ever, in block (0, 0)"),
        ("wait_apart", "lanes that wait in different places"),
        ("shuffle_from_outside", "a shuffle from a lane that is not in the mask"),
        ("load_unaligned", "an access that is not aligned"),
        ("read_beyond", "heap-buffer-overflow"),
    ],
)
def test_faults_end_the_process_and_are_told(planted: Path, name: str, said: str) -> None:
    for order in (0, 1, 2):
        done = run(planted, name, order)
        assert done.returncode != 0
        assert said in done.stderr


def test_who_waits_where_is_told(planted: Path) -> None:
    told = run(planted, "leave_early", 1).stderr
    waiting = [line for line in told.splitlines() if "waits in __syncwarp of line" in line]
    assert len(waiting) == 32, told
