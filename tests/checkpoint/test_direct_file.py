"""Files that are written past the page cache: every byte, whatever sizes they come in."""

import errno
import hashlib
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.checkpoint import direct_file
from oper.checkpoint.direct_file import DirectFile

BUFFER = 2 * 4096
sizes = st.one_of(
    st.integers(0, 3 * BUFFER), st.sampled_from([0, 1, 4095, 4096, 4097, BUFFER, 9 * BUFFER])
)
pwrite = os.pwrite


def written(path: Path, parts: list[bytes]) -> str:
    """Write a file of these parts; the SHA-256 that it says it has."""
    file = DirectFile(path)
    try:
        for part in parts:
            assert file.write(part) == len(part)
        assert file.bytes == sum(map(len, parts))
        return file.close()
    finally:
        file.abandon()


@pytest.fixture(scope="module", params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder on a disk, and one in memory, which may take no direct writes."""
    if request.param == "disk":
        yield tmp_path_factory.mktemp("direct")
        return
    made = Path(f"/dev/shm/oper-test-{os.getpid()}")
    made.mkdir()
    yield made
    made.rmdir()


@given(parts=st.lists(sizes, max_size=8), seed=st.integers(0, 255), direct=st.booleans())
def test_a_file_has_all_bytes_in_their_order(folder, parts, seed, direct) -> None:
    content = os.urandom(256) * (sum(parts) // 256 + 1)
    ends = [sum(parts[:n]) for n in range(len(parts) + 1)]
    given_parts = [content[a:b] for a, b in pairwise(ends)]
    path = folder / "file"
    refuse = 0 if direct else 1 + seed % 3

    def write(file: int, data: Any, at: int) -> int:
        nonlocal refuse
        refuse -= 1
        if refuse == 0:
            raise OSError(errno.EINVAL, "not of this size")
        return pwrite(file, data[: max(4096, len(data) // 2)], at)  # some, and not all

    with patch.object(direct_file, "BUFFER_BYTES", BUFFER), patch.object(os, "pwrite", write):
        digest = written(path, given_parts)
    found = path.read_bytes()
    path.unlink()
    assert found == content[: sum(parts)]
    assert digest == hashlib.sha256(found).hexdigest()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_finds_no_room_is_an_error(tmp_path: Path, number: int) -> None:
    threads = threading.active_count()
    wrote = 0

    def write(file: int, data: Any, at: int) -> int:
        nonlocal wrote
        wrote += 1
        if wrote == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    with (
        patch.object(direct_file, "BUFFER_BYTES", BUFFER),
        patch.object(os, "pwrite", write),
        pytest.raises(OSError, match="No space left"),
    ):
        written(tmp_path / "file", [bytes(BUFFER)] * 5)
    assert threading.active_count() == threads
    assert not [f for f in os.listdir("/proc/self/fd") if _opened(f) == str(tmp_path / "file")]


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def _opened(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
