"""Paths to other things than files, and to files that are too large, are refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import oper
from oper.base.errors import OperError
from oper.checkpoint.chain import read_chain
from oper.cost.workload import Workload
from oper.files.input_files import JSON, YAML, Kind, read_bytes, refuse_url
from oper.files.json_file import read_json
from oper.files.overwrite_rules import inside_refusal
from oper.files.safetensors_file import load_safetensors
from oper.files.storage import check_output, load_array
from oper.files.yaml_file import Document
from oper.monitoring.json_lines import JsonLines
from oper.plan.plan import FORMAT, Plan
from oper.profiling.profile import Profile
from oper.topology.topology import Topology
from tests.support.commands import make_folder, refused

URL = "s3://bucket/a/b"
READERS = [Document.read, read_json, load_safetensors, load_array]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    make_folder(folder)
    return folder


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    words = {
        "pipe": "expected .*, got a pipe",
        "/dev/zero": "expected .*, got a device",
        "socket": "cannot be opened",
        ".": "expected a .*, got a folder; give a file",
        "a\0b": "cannot be opened",
        "absent": "no such file",
    }
    for name, said in words.items():
        with pytest.raises(OperError, match=said if "got" in said else f"{said}.*; expected"):
            read(tmp_path / name)


@pytest.mark.parametrize(("read", "kind"), [(Document.read, YAML), (read_json, JSON)])
def test_files_that_are_too_large(
    tmp_path: Path, read: Callable[[Path], object], kind: Kind
) -> None:
    assert kind.most_bytes is not None
    with open(tmp_path / "large", "wb") as file:
        file.truncate(kind.most_bytes + 1)
    words = rf"{kind.name} of at most {kind.most_bytes:,} bytes, got {kind.most_bytes + 1:,}"
    with pytest.raises(OperError, match=words):
        read(tmp_path / "large")


def test_files_that_only_look_empty() -> None:
    assert read_bytes("/proc/self/stat", YAML) == b""


def test_a_pipe_as_the_marker_of_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FORMAT.marker)
    assert inside_refusal(tmp_path / "new") is None
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


def test_commands_refuse_them_at_once(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    refused(f"plan {kinds / 'p'} --config pipe -o new", "pipe: expected a YAML file, got a pipe")
    Path("settings.yaml").write_text("plan: {topology: /dev/zero}\n")
    refused(
        f"plan {kinds / 'p'} --config settings.yaml -o new",
        "/dev/zero: expected a YAML file, got a device",
    )
    refused(
        f"plan {kinds / 'p'} --config /dev/zero -o new",
        "/dev/zero: expected a YAML file, got a device",
    )


READ = f"{URL}: expected a path, got a URL; oper reads local files only: download it"
WRITTEN = f"{URL}: expected a path, got a URL; oper writes local files only"


@pytest.mark.parametrize(
    "command",
    [
        f"profile {URL} -o new",
        f"profile log.parquet {URL}",
        f"profile log.parquet --tables {URL} -o new",
        f"plan {URL} --topology cpu:2 -o new",
        f"plan p --topology {URL} -o new",
        f"plan p --config {URL} --topology cpu:2 -o new",
        f"plan show {URL}",
        f"plan diff q {URL}",
        f"plan check q {URL}",
        f"drift q {URL}",
        f"compare {URL} --topology cpu:2",
        f"simulate {URL}",
        f"report q --profile {URL} -o new",
        f"report q --compare {URL} -o new",
        f"report q --drift {URL} -o new",
        f"report q --counters {URL} -o new",
        f"doctor q model.py:make --batch {URL}",
        f"top {URL}",
        f"topology show {URL}",
        f"checkpoint inspect {URL}",
        f"profiles merge p {URL} -o new",
    ],
)
def test_urls_that_commands_are_to_read(
    kinds: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kinds)
    refused(command, READ)


@pytest.mark.parametrize(
    "command",
    ["profile log.parquet -o", "plan p --topology cpu:2 -o", "replan q p -o", "report q -o",
     "topology measure --ranks 1 -o", "profiles merge p p -o"],
)  # fmt: skip
def test_urls_that_commands_are_to_write(
    kinds: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kinds)
    refused(f"{command} {URL}", WRITTEN)


@pytest.mark.parametrize("form", [str, Path])
def test_urls_in_python(
    kinds: Path, tmp_path: Path, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path` makes one slash of two, and an error shows both."""
    monkeypatch.chdir(tmp_path)
    url, workload, ranks = form(URL), Workload("training"), Topology.load("cpu:2")
    plan, profile = Plan.load(kinds / "q"), Profile.load(kinds / "p")
    readers: list[Callable[[], object]] = [
        lambda: Plan.load(url),
        lambda: Profile.load(url),
        lambda: Topology.load(url),
        lambda: oper.profile(url),
        lambda: oper.profile(kinds / "log.parquet", url),
        lambda: list(oper.read(url, plan.tables)),
        lambda: oper.make_plan(url, ranks, workload),
        lambda: oper.compare(url, ranks, workload),
        lambda: oper.drift(plan, url),
        lambda: oper.replan(url, profile),
        lambda: oper.check(url),
        lambda: read_chain(url),
        lambda: oper.write_report(plan, tmp_path / "x", drift=url),
    ]
    for read in readers:
        with pytest.raises(OperError) as refusal:
            read()
        assert str(refusal.value).startswith(READ), refusal.value
    writers: list[Callable[[], object]] = [
        lambda: plan.save(url),
        lambda: profile.save(url),
        lambda: oper.profile(kinds / "log.parquet", output=url),
        lambda: oper.write_report(plan, url),
        lambda: JsonLines(url),
    ]
    for write in writers:
        with pytest.raises(OperError) as refusal:
            write()
        assert str(refusal.value).startswith(WRITTEN), refusal.value
    assert list(tmp_path.iterdir()) == []


def test_other_forms_of_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("file:///data/a%20b", Path("file:///data/a%20b")):
        with pytest.raises(OperError, match=r"^file:///data/a%20b: .* pass /data/a b$"):
            refuse_url(path)
    for path in ("log", "/x/s3:/y", "C:/x", "a:b", "dt=a:/x", "./s3://x"):
        refuse_url(path)
    (tmp_path / "s3:" / "x").mkdir(parents=True)
    refuse_url(Path("s3://x"))  # It is there.
