"""Bases and deltas read as one whole: rows of the last link that has them, and what is damaged or
does not fit together refused by name."""

import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from oper.base.errors import OperError
from oper.checkpoint.chain import check_replaceable
from oper.checkpoint.describe import describe
from oper.checkpoint.export import export
from oper.checkpoint.marker import FORMAT, Delta, Marker
from oper.checkpoint.reshard import reshard
from oper.checkpoint.saved_index import read_index
from oper.checkpoint.saved_rows import read_rows
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.verify import bytes_to_verify, verify
from tests.checkpoint.test_tools import small
from tests.support.checkpoint.delta_folders import write_base, write_delta
from tests.support.checkpoint.saved_folders import STATE, WEIGHT
from tests.support.examples import examples


@examples(40)
@hypothesis.given(st.data())
def test_rows_are_those_of_the_last_link_that_has_them(data: st.DataObject) -> None:
    columns, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.rand(count, columns, generator=random)
        return values, torch.rand(count, generator=random)

    with tempfile.TemporaryDirectory() as place, small():
        run = Path(place) / "run"
        weight, state = drawn(rows)
        upon = ("0", write_base(run / "0", weight, state))
        for number in range(1, data.draw(st.integers(1, 4)) + 1):
            grown = data.draw(st.sampled_from([0, 0, 3]))  # whose rows are all in the delta
            chosen = data.draw(st.sets(st.integers(0, rows - 1)))
            ids = torch.tensor(sorted(chosen | {*range(rows, rows + grown)}), dtype=torch.int64)
            rows += grown
            values, states = drawn(len(ids))
            cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=3))
            given = (ids, values, states, rows, cuts, number)
            upon = (str(number), write_delta(run / str(number), upon, *given))
            weight, state = (
                torch.cat([old, torch.zeros(grown, *old.shape[1:])]) for old in (weight, state)
            )
            weight[ids], state[ids] = values, states
        chain = open_chain(run)
        assert len(chain.links) == number + 1
        assert chain.index.tensors[WEIGHT].shape == weight.shape
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        for name, expected in ((WEIGHT, weight), (STATE, state)):
            assert torch.equal(chain.read_rows(name, first, count), expected[first : first + count])
        amounts: list[float] = []
        assert verify(chain, amounts.append).ok
        assert sum(amounts) == bytes_to_verify(chain)
        reshard(run, Path(place) / "whole", 2)
        whole = read_index(Path(place) / "whole")
        assert set(whole.tensors) == {WEIGHT, STATE, "model.over.weight"}
        assert torch.equal(read_rows(Path(place) / "whole", whole.tensors[WEIGHT], 0, rows), weight)
        assert Marker.read(Path(place) / "whole").delta is None
        dense = read_rows(Path(place) / "whole", whole.tensors["model.over.weight"], 0, 5)
        assert dense.tolist() == [float(number)] * 5
        export(run, "t", Path(place) / "t.safetensors")
        exported = load_file(Path(place) / "t.safetensors")
        assert torch.equal(exported["weight"], weight)
        assert torch.equal(exported["momentum1"], state)


def chain_of_two(run: Path, ids: list[int] | None = None, rows: int = 10) -> tuple[Path, Marker]:
    """A base of ten rows and a delta upon it; the delta's folder, and the base's marker."""
    base = write_base(run / "base", torch.rand(10, 2), torch.rand(10))
    numbers = torch.tensor([2, 5, 9] if ids is None else ids)
    values = (torch.rand(len(numbers), 2), torch.rand(len(numbers)))
    write_delta(run / "delta", ("base", base), numbers, *values, rows, [2])
    return run / "delta", base


def test_a_delta_is_described_by_what_it_has(tmp_path: Path) -> None:
    delta, _ = chain_of_two(tmp_path / "run")
    found = describe(tmp_path / "run").to_json()
    assert found["checkpoint"] == str(delta)
    assert found["upon"] == "base"
    (table,) = found["tables"]
    assert (table["rows"], table["touched_rows"], table["weight"]["shape"]) == (10, 3, [3, 2])
    assert [tensor["tensor"] for tensor in found["tensors"]] == ["model.over.weight"]
    base = describe(tmp_path / "run" / "base").to_json()
    assert base["upon"] is None
    assert "touched_rows" not in base["tables"][0]


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([5, 2, 9], 10, "'touched.t': its rows do not ascend"),
        ([2, 2, 9], 10, "its rows do not ascend"),
        ([2, 9, 5], 10, "its rows do not ascend"),
        ([-1, 2, 9], 10, "its rows do not ascend"),
        ([2, 5, 10], 10, "it has row 10 of 10"),
        ([2, 5, 9], 12, "neither it nor the links before it have row 10"),
    ],
)
def test_rows_that_no_saver_writes_are_refused(
    tmp_path: Path, ids: list[int], rows: int, message: str
) -> None:
    delta, _ = chain_of_two(tmp_path / "run", ids, rows)
    with pytest.raises(OperError, match=message):
        open_chain(delta).read_rows(WEIGHT, 0, rows)
    with pytest.raises(OperError, match=message):
        reshard(delta, tmp_path / "whole", 1)
    assert not (tmp_path / "whole").exists()


def test_links_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    delta, base = chain_of_two(run)
    with pytest.raises(OperError, match="base: delta is a delta upon it"):
        check_replaceable(run / "base")
    with pytest.raises(OperError, match="base: delta is a delta upon it"):
        reshard(delta, run / "base", 1, overwrite=True)
    check_replaceable(delta)
    check_replaceable(run / "nothing")
    (tmp_path / "link").symlink_to(delta)
    assert len(open_chain(tmp_path / "link").links) == 2
    (run / "base").rename(run / "moved")
    for use in (open_chain, verify):
        with pytest.raises(OperError, match=r"is a delta upon base, and .* holds no checkpoint"):
            use(delta)
    write_base(run / "base", torch.rand(10, 2), torch.rand(10))
    assert base.digest[:12]
    with pytest.raises(OperError, match=f"of SHA-256 {base.digest[:12]}…, and .* is another"):
        open_chain(delta)
    check_replaceable(run / "base")  # which the delta is not upon


@pytest.mark.parametrize("upon", ["../base", "", ".", "..", "a/b", "a\0b", 7, None])
def test_a_marker_names_no_other_place(tmp_path: Path, upon: object) -> None:
    content = {"upon": upon, "sha256": "0" * 64, "tables": {}}
    assert Delta.of(content) is None
    assert Delta.of(content | {"upon": "base"}) is not None
    assert Delta.of(content | {"upon": "base", "tables": {"t": {"rows": -1}}}) is None


def test_markers_of_whole_checkpoints_are_as_they_were(tmp_path: Path) -> None:
    write_base(tmp_path / "base", torch.rand(10, 2), torch.rand(10))
    assert '"delta"' not in (tmp_path / "base" / FORMAT.marker).read_text()
