"""The index of a checkpoint: what torch wrote is read, and nothing that a pickle names is run."""

import io
import os
import pickle
import re
import tempfile
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from oper.base.errors import OperError
from oper.checkpoint.index_pickle import load_index
from oper.checkpoint.saved_index import Extent, Shard, read_index
from tests.support.checkpoint.saved_folders import Part, write
from tests.support.examples import examples


def test_what_torch_saved_is_found(tmp_path: Path) -> None:
    state = {
        "model": OrderedDict(a=torch.rand(4, 3), step=torch.tensor(7)),
        "optimizer": {"param_groups": [{"lr": 0.1}], "name": "adam"},
    }
    save(state, checkpoint_id=tmp_path / "made", no_dist=True)
    found = read_index(tmp_path / "made")
    assert set(found.tensors) == {"model.a", "model.step"}
    assert found.tensors["model.a"].shape == (4, 3)
    assert found.tensors["model.step"].shape == ()
    assert found.tensors["model.step"].dtype == torch.int64
    assert set(found.objects) == {"optimizer.param_groups.0.lr", "optimizer.name"}
    assert found.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")


class Evil:
    """An object whose pickle runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.mark.parametrize("where", ["alone", "in an index"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    ran = tmp_path / "ran"
    evil: Any = Evil(f"touch {ran}")
    content = evil if where == "alone" else Metadata({}, planner_data=evil, storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(OperError, match=r"names 'posix\.system', which no index of a checkpoint"):
        read_index(tmp_path)
    assert not ran.exists()
    # It would have run.
    pickle.loads(pickle.dumps(evil))
    assert ran.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.getattr",
        "torch.load",
        "torch.serialization.load",
        "torch.distributed.checkpoint.filesystem.FileSystemReader",
        "torch.nn.Module",
    ],
)
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(OperError, match="which no index of a checkpoint has, and which was not"):
        read_index(tmp_path)


def test_a_pickle_cannot_change_torchs_classes(tmp_path: Path) -> None:
    # It names a class and sets an attribute of that: (None, {"version": 1}) is a state of slots.
    named = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (tmp_path / ".metadata").write_bytes(named + b"(N(dS'version'\nI1\nstb.")
    with pytest.raises(OperError):
        read_index(tmp_path)
    assert Metadata.version is None


def _write_index(folder: Path, **changes: Any) -> None:
    """An index of a tensor [4, 3] in two shards, with other values of some of it."""
    given: dict[str, Any] = {
        "size": (4, 3),
        "offsets": ((0, 0), (2, 0)),
        "sizes": ((2, 3), (2, 3)),
        "file": "__0_0.distcp",
        "places": 2,
        "transform": None,
    } | changes
    chunks = [
        ChunkStorageMetadata(torch.Size(o), torch.Size(s))
        for o, s in zip(given["offsets"], given["sizes"], strict=True)
    ]
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size(given["size"]), chunks
    )
    places = {
        MetadataIndex("a", torch.Size(o)): _StorageInfo(given["file"], 0, 9, given["transform"])
        for o in given["offsets"][: given["places"]]
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"a": tensor}, None, places)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (5, 3)}, r"has shards of 12 values instead of 15"),
        ({"sizes": ((2, 3), (3, 3))}, r"of shape \(4, 3\) has a shard of \(3, 3\) at \(2, 0\)"),
        ({"offsets": ((0, 0), (1, 0))}, "has two shards of the same values"),
        ({"places": 1}, r"has no place for its part at \(2, 0\)"),
        ({"file": "../a.distcp"}, "lies in '../a.distcp', which is no file of the folder"),
        ({"file": "/etc/passwd"}, "which is no file of the folder"),
        ({"transform": ["zstd"]}, "encoded by an extension of torch's"),
    ],
)
def test_an_unsound_index_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _write_index(tmp_path)
    (tensor,) = read_index(tmp_path).tensors.values()
    assert tensor.shards[1] == Shard((2, 0), (2, 3), Extent("__0_0.distcp", 0, 9))
    _write_index(tmp_path, **changes)
    with pytest.raises(OperError, match=message):
        read_index(tmp_path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_indices_of_all_protocols_are_read(tmp_path: Path, protocol: int) -> None:
    _write_index(tmp_path)
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    expected = read_index(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content, protocol))
    assert read_index(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Nr\x00\x00\x00\x10.", "it keeps a value as number 268435456, and had 0"),
        (b"Np268435456\n.", "it keeps a value as number 268435456, and had 0"),
        (b"Np-1\n.", "it keeps a value as number -1"),
        (b"Nq\x00Nq\x02.", "it keeps a value as number 2, and had 1"),
        (b"\x8d" + (1 << 40).to_bytes(8, "little") + b"x.", "it ends early"),
        (b"B\xff\xff\xff\xffx.", "it ends early"),
        (b"\x96" + (1 << 40).to_bytes(8, "little") + b".", "which no index has"),
        (b"\x82\x01.", "which no index has"),
        (b"V" + b"x" * 99, "it ends early"),
        (b"", "it ends early"),
    ],
)
def test_a_pickle_takes_no_more_memory_than_it_has_bytes(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(OperError, match=re.escape(message)) as refused:
            read_index(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(tmp_path / ".metadata") in str(refused.value)


@examples(100)
@hypothesis.given(st.data())
def test_shards_tile_their_tensor_if_each_value_is_in_one(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(data.draw(st.integers(0, 6))):  # cut one in two
        offsets, sizes = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, sizes[axis]))
        low, high, moved = list(sizes), list(sizes), list(offsets)
        low[axis], high[axis], moved[axis] = at, sizes[axis] - at, offsets[axis] + at
        boxes += [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    boxes = [box for box in boxes if all(box[1])]
    if data.draw(st.booleans()):  # move one
        offsets, sizes = boxes.pop()
        room = [st.integers(0, n - m) for n, m in zip(shape, sizes, strict=True)]
        boxes.append((data.draw(st.tuples(*room)), sizes))
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    with tempfile.TemporaryDirectory() as folder:
        given = {"size": shape, "offsets": [o for o, _ in boxes], "sizes": [n for _, n in boxes]}
        _write_index(Path(folder), **given, places=len(boxes))
        if (counts == 1).all():
            assert len(read_index(folder).tensors["a"].shards) == len(boxes)
        else:
            with pytest.raises(OperError, match="has two shards of the same values"):
                read_index(folder)


def test_as_many_shards_of_columns_are_compared_as_there_may_be(tmp_path: Path) -> None:
    """Their number of comparisons grows as they do: all pairs of these would take minutes."""
    count = 20_000
    offsets, sizes = [(0, column) for column in range(count)], [(3, 1)] * count
    _write_index(tmp_path, size=(3, count), offsets=offsets, sizes=sizes, places=count)
    assert len(read_index(tmp_path).tensors["a"].shards) == count


def test_an_empty_shard_of_a_rank_beyond_the_rows_needs_no_place(tmp_path: Path) -> None:
    write(tmp_path / "made", {"a": (torch.rand(2, 3), [Part((0, 2)), Part((2, 2))])}, {})
    (tensor,) = read_index(tmp_path / "made").tensors.values()
    assert [shard.sizes for shard in tensor.shards] == [(2, 3)]


_KEYS: dict[str, bytes] = {
    "pairs": b"\x86",
    "threes": b"h\x00\x87",
    "marked": b"t",
}


@pytest.mark.parametrize("tuples", _KEYS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_tuple_of_one_tuple_many_times_is_refused(
    tmp_path: Path, tuples: str, protocol: int
) -> None:
    """To hash it Python would go through 2^40 values."""
    parts = [b")"]
    for number in range(40):
        kept = b"\x94" if protocol == 4 else b"q%c" % number
        again = b"h%c" % number
        build = _KEYS[tuples]
        before = b"(" if build == b"t" else b""
        parts.append(kept + b"0" + before + again + again + build)
    content = b"\x80%c}" % protocol + b"".join(parts) + b"K\x01s."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(OperError, match="a tuple of more than 4096 values"):
        read_index(tmp_path)


def test_a_number_that_is_kept_again_stands_for_the_last_value(tmp_path: Path) -> None:
    doubled = b"h\x00h\x00\x86q\x000"
    content = b"\x80\x02)q\x000" + doubled * 40 + b"N."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(OperError, match="a tuple of more than 4096 values"):
        read_index(tmp_path)
    content = b"\x80\x02K\x01q\x000K\x02q\x000h\x00."
    assert load_index(io.BufferedReader(cast(Any, io.BytesIO(content)))) == 2


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@hypothesis.given(
    st.recursive(
        _PLAIN,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(st.text() | st.tuples(st.integers(), st.text()), inner, max_size=5)
        ),
    ),
    st.integers(2, pickle.HIGHEST_PROTOCOL),
)
def test_plain_values_are_read_as_they_are(value: object, protocol: int) -> None:
    shared = [value, (value, [value]), {"again": value}]
    content = io.BufferedReader(cast(Any, io.BytesIO(pickle.dumps(shared, protocol))))
    assert repr(load_index(content)) == repr(shared)
