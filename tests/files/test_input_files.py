"""What a path leads to that is no file, or none of such a size, is refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oper.base.errors import OperError
from oper.files.input_files import JSON, YAML, Kind, read_bytes
from oper.files.json_file import read_json
from oper.files.overwrite_rules import was_written
from oper.files.safetensors_file import load_safetensors
from oper.files.storage import check_output, load_array
from oper.files.yaml_file import Document
from oper.plan.plan import FORMAT, Plan
from tests.support.commands import refused

READERS = [Document.read, read_json, load_safetensors, load_array]


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    words = {
        "pipe": "is a pipe",
        "/dev/zero": "is a device",
        "socket": "cannot be opened",
        ".": "expected a .*, got a folder; give a file",
        "a\0b": "cannot be opened",
        "absent": "no such file",
    }
    for name, said in words.items():
        with pytest.raises(OperError, match=said if "got" in said else f"{said}.* was needed"):
            read(tmp_path / name)


@pytest.mark.parametrize(("read", "kind"), [(Document.read, YAML), (read_json, JSON)])
def test_files_that_are_too_large(
    tmp_path: Path, read: Callable[[Path], object], kind: Kind
) -> None:
    assert kind.most_bytes is not None
    with open(tmp_path / "large", "wb") as file:
        file.truncate(kind.most_bytes + 1)
    words = rf"has {kind.most_bytes + 1:,} bytes, and {kind.name}, of at most {kind.most_bytes:,}"
    with pytest.raises(OperError, match=words):
        read(tmp_path / "large")


def test_files_that_only_look_empty() -> None:
    assert read_bytes("/proc/self/stat", YAML) == b""


def test_a_pipe_as_the_marker_of_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FORMAT.marker)
    assert not was_written(tmp_path, FORMAT)
    with pytest.raises(OperError, match="was not written by oper"):
        check_output(tmp_path, FORMAT, overwrite=True)
    with pytest.raises(OperError, match=FORMAT.marker):
        Plan.load(tmp_path)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_arrays_are_mapped_as_numpy_maps_them(
    tmp_path: Path, shape: tuple[int, ...], order: str
) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", array)
    for mmap in (False, True):
        loaded = load_array(tmp_path / "a.npy", mmap)
        assert isinstance(loaded, np.memmap) == mmap
        np.testing.assert_array_equal(loaded, array)


def test_arrays_of_objects_are_not_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    for mmap in (False, True):
        with pytest.raises(OperError, match=r"[Oo]bject"):
            load_array(tmp_path / "a.npy", mmap)


def test_commands_refuse_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    refused("plan p --config pipe -o new", "pipe: is a pipe")
    Path("settings.yaml").write_text("plan: {topology: /dev/zero}\n")
    refused("plan p --config settings.yaml -o new", "/dev/zero: is a device")
    refused("plan p --config /dev/zero -o new", "/dev/zero: is a device")
