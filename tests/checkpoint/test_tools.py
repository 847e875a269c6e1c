"""Reading, verifying, resharding and exporting checkpoints, of any shards, compared with torch."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

from oper.base.errors import OperError
from oper.checkpoint import saved_tables, shard_file
from oper.checkpoint.describe import describe
from oper.checkpoint.export import export
from oper.checkpoint.reshard import reshard
from oper.checkpoint.row_blocks import row_blocks
from oper.checkpoint.saved_index import read_index
from oper.checkpoint.saved_rows import read_rows
from oper.checkpoint.verify import verify
from tests.support.checkpoint.saved_folders import STATE, WEIGHT, Part, write
from tests.support.examples import examples

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@contextmanager
def small() -> Iterator[None]:
    """Rows are copied in pieces of a few, and shards beyond 400 bytes are read in part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tables, "_PIECE_BYTES", 100)
        patch.setattr(shard_file, "MOST_WHOLE_BYTES", 400)
        yield


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, list[Part]]:
    """Rows, columns, and shards of them: of rows, or of rows and columns."""
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 9))

    def cuts(most: int, count: int) -> list[tuple[int, int]]:
        inner = draw(st.lists(st.integers(1, most), max_size=count))
        edges = sorted({0, most, *inner})
        return list(pairwise(edges))

    if draw(st.booleans()):
        return rows, columns, [Part(part) for part in cuts(rows, 4)]
    # Each stripe of columns is cut into rows in its own way.
    return (
        rows,
        columns,
        [Part(part, stripe) for stripe in cuts(columns, 2) for part in cuts(rows, 3)],
    )


@examples(40)
@hypothesis.given(
    grids(), st.sampled_from(DTYPES), st.integers(1, 5), st.integers(0, 60), st.integers(1, 60)
)
def test_rows_are_those_that_were_saved_however_they_are_cut(
    grid: tuple[int, int, list[Part]], dtype: torch.dtype, ranks: int, first: int, count: int
) -> None:
    rows, columns, parts = grid
    weight, state = torch.rand(rows, columns).to(dtype), torch.rand(rows)
    first = min(first, rows - 1)
    count = min(count, rows - first)
    with tempfile.TemporaryDirectory() as place, small():
        folder, other = Path(place) / "made", Path(place) / "other"
        dense = torch.rand(5, 2)
        write(
            folder,
            {
                WEIGHT: (weight, parts),
                STATE: (state, [Part((0, rows))]),
                "model.over.weight": (dense, [Part((0, 5))]),
            },
            {"optimizer.lr": 0.5},
        )
        tensor = read_index(folder).tensors[WEIGHT]
        assert torch.equal(read_rows(folder, tensor, first, count), weight[first : first + count])
        assert verify(folder).ok
        reshard(folder, other, ranks)
        found = verify(other)
        assert found.ok, found.problems
        # As torch reads it.
        read: dict[str, Any] = {
            WEIGHT: torch.zeros_like(weight),
            STATE: torch.zeros(rows),
            "optimizer.lr": 0.0,
        }
        read["model.over.weight"] = torch.zeros(5, 2)
        load(read, checkpoint_id=other, no_dist=True)
        assert torch.equal(read[WEIGHT], weight)
        assert torch.equal(read[STATE], state)
        assert torch.equal(read["model.over.weight"], dense)
        assert read["optimizer.lr"] == 0.5
        blocks = row_blocks(rows, ranks)
        for shard in read_index(other).tensors[WEIGHT].shards:
            begin, size = blocks[int(shard.extent.file[2])]
            assert begin <= shard.offsets[0] < begin + size
            assert shard.offsets[0] + shard.sizes[0] <= begin + size
        # As other programs read it.
        table = export(other, "t", Path(place) / "t.safetensors")
        assert list(table.states) == ["momentum1"]
        exported = load_file(Path(place) / "t.safetensors")
        assert exported.keys() == {"weight", "momentum1"}
        assert torch.equal(exported["weight"], weight)
        assert torch.equal(exported["momentum1"], state)
        export(other, "t", Path(place) / "t.parquet")
        frame = pq.read_table(Path(place) / "t.parquet")
        assert frame["row"].to_pylist() == list(range(rows))
        values = np.array(frame["weight"].to_pylist())
        assert np.array_equal(values, weight.double().numpy())
        assert np.array_equal(np.array(frame["momentum1"].to_pylist()), state.double().numpy())


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A checkpoint of torch's, of a table in two shards, a state, a dense tensor and an object."""
    weight, state = torch.rand(20, 4), torch.rand(20)
    tensors = {
        WEIGHT: (weight, [Part((0, 9)), Part((9, 20))]),
        STATE: (state, [Part((0, 20))]),
        "model.over.weight": (torch.rand(5), [Part((0, 5))]),
    }
    write(tmp_path / "made", tensors, {"optimizer.lr": 0.5})
    return tmp_path / "made"


def removed(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def turned(file: Path) -> None:
    """A bit of a value."""
    content = bytearray(file.read_bytes())
    content[content.index(b"data/0") + 90] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("with_marker", [False, True])
@pytest.mark.parametrize(
    ("damage", "by_marker", "without"),
    [
        (removed, "is missing", "is missing"),
        (cut, "were written", "it is truncated"),
        (turned, "its SHA-256 is not", "has another CRC-32"),
    ],
)
def test_damage_is_found_and_the_file_named(
    made: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    by_marker: str,
    without: str,
    with_marker: bool,
) -> None:
    folder = reshard(made, tmp_path / "other", 2) if with_marker else made
    whole = verify(folder)
    assert whole.ok
    damage(folder / "__1_0.distcp")
    found = verify(folder)
    assert not found.ok
    assert all("__1_0.distcp" in problem for problem in found.problems)
    assert any((by_marker if with_marker else without) in problem for problem in found.problems)
    assert found.checked == whole.checked
    # It is not copied further either.
    with pytest.raises(OperError, match=r"__1_0\.distcp"):
        reshard(folder, tmp_path / "third", 1)
    assert not (tmp_path / "third").exists()


def test_what_was_read_is_counted(made: Path, tmp_path: Path) -> None:
    amounts: list[float] = []
    assert verify(made, amounts.append).bytes == sum(amounts)
    amounts.clear()
    other = reshard(made, tmp_path / "other", 3, advance=amounts.append)
    assert sum(amounts) == describe(made).bytes == 20 * 4 * 4 + 20 * 4 + 5 * 4
    amounts.clear()
    assert verify(other, amounts.append).bytes == sum(amounts)
    amounts.clear()
    table = export(other, "t", tmp_path / "t.parquet", advance=amounts.append)
    assert sum(amounts) == table.bytes


def test_a_checkpoint_is_described(made: Path, tmp_path: Path) -> None:
    found = describe(made).to_json()
    assert json.loads(json.dumps(found)) == found
    (table,) = found["tables"]
    assert (table["name"], table["rows"], table["dim"]) == ("t", 20, 4)
    assert table["weight"] == {
        "tensor": WEIGHT,
        "shape": [20, 4],
        "dtype": "float32",
        "bytes": 320,
        "shards": 2,
    }
    assert table["momentum1"]["tensor"] == STATE
    assert [tensor["tensor"] for tensor in found["tensors"]] == ["model.over.weight"]
    assert found["objects"] == ["optimizer.lr"]
    assert (found["step"], found["plan"], found["ranks"]) == (None, None, None)
    other = describe(reshard(made, tmp_path / "other", 3)).to_json()
    assert other["ranks"] == 3
    assert other["tables"][0]["weight"]["shards"] == 3


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
def test_an_export_replaces_only_an_export(made: Path, tmp_path: Path, ending: str) -> None:
    place = tmp_path / f"t.{ending}"
    for overwrite in (False, True):
        export(made, "t", place, overwrite)
    place.write_bytes(b"mine")
    with pytest.raises(OperError, match="was not written by oper"):
        export(made, "t", place, overwrite=True)
    assert place.read_bytes() == b"mine"


def test_what_cannot_be_exported_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(OperError, match=r"ends in \.safetensors or \.parquet, got '\.csv'"):
        export(made, "t", tmp_path / "t.csv")
    with pytest.raises(OperError, match="table 'u': is not in the checkpoint; its tables are 't'"):
        export(made, "u", tmp_path / "u.parquet")
    export(made, "t", tmp_path / "t.parquet")
    with pytest.raises(OperError, match="exists; choose another path"):
        export(made, "t", tmp_path / "t.parquet")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperError, match="no such folder"):
        describe(tmp_path / "none")
    with pytest.raises(OperError, match=r"holds no checkpoint\.json and no folder that does"):
        describe(tmp_path)


def test_of_several_the_one_of_the_highest_step_is_taken(made: Path, tmp_path: Path) -> None:
    every = tmp_path / "every"
    for number in range(2):
        reshard(made, every / f"number-{number}", 1)
    # A save that was killed left its folder, with what would be a marker.
    shutil.copytree(every / "number-1", every / ".number-1.0123456789abcdef.oper-tmp")
    assert describe(every).folder == every / "number-1"
