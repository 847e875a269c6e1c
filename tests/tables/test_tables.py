"""Tables: bytes, offsets, files, published data sets and TorchRec modules."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.tables.table import IdRule, Table, fingerprint, offsets, tables_of, with_missing
from oper.tables.table_file import load_tables, published_names

names = st.text("abcXYZ_09", min_size=1, max_size=5)
rules = st.builds(
    IdRule,
    st.sampled_from(["dense", "hash", "vocab"]),
    st.integers(1, 9),
    st.none() | st.just("-1"),
)
tables = st.builds(
    Table,
    name=names,
    rows=st.integers(1, 1 << 40),
    dim=st.integers(1, 512),
    dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    optimizer=st.sampled_from(["none", "sgd", "momentum_sgd", "adagrad", "rowwise_adagrad"]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    features=st.lists(names, max_size=3).map(tuple),
    ids=rules,
)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "row", "training"),
    [
        ("fp32", "none", 64, 64),
        ("fp32", "sgd", 64, 64),
        ("fp32", "rowwise_adagrad", 64, 68),
        ("fp32", "adagrad", 64, 128),
        ("fp16", "momentum_sgd", 32, 96),
        ("bf16", "adam", 32, 160),
        ("fp32", "partial_rowwise_adam", 64, 132),
        ("int8", "none", 24, 24),
    ],
)
def test_bytes_of_a_row(dtype: str, optimizer: str, row: int, training: int) -> None:
    table = Table("t", 10, 16, dtype, optimizer)
    assert table.row_bytes == row
    assert table.memory_bytes("inference") == row
    assert table.memory_bytes("training") == training


@given(tables)
def test_a_table_survives_json(table: Table) -> None:
    assert Table.from_dict(table.to_dict()) == table


@given(tables, st.sampled_from(["rows", "dim", "name", "ids"]))
def test_the_fingerprint_depends_on_what_a_plan_depends_on(table: Table, field: str) -> None:
    content = table.to_dict()
    changed = {
        "rows": table.rows + 1,
        "dim": table.dim + 1,
        "name": table.name + "x",
        "ids": table.to_dict()["ids"] | {"min_count": table.ids.min_count + 1},
    }
    other = Table.from_dict(content | {field: changed[field]})
    assert fingerprint([table]) == fingerprint([Table.from_dict(content)])
    assert fingerprint([table]) != fingerprint([other])


def test_offsets_number_all_rows_through() -> None:
    result = offsets([Table("a", 3), Table("b", 1), Table("c", 5)])
    assert result.dtype == np.int64
    assert result.tolist() == [0, 3, 4, 9]


@pytest.mark.parametrize(
    ("name", "count", "rows"),
    [
        ("criteo-kaggle", 26, 33_762_577),
        ("criteo-terabyte", 26, 882_774_559),
        ("criteo-terabyte-40m", 26, 204_184_588),
        ("avazu", 20, 8_930_581),
        ("meta-2021", 856, 2_328_942_965),
        ("syn-small", 100, 838_860_800),
        ("syn-large", 300, 2_516_582_400),
    ],
)
def test_published_sizes(name: str, count: int, rows: int) -> None:
    loaded = load_tables(name, dim=16, optimizer="sgd", ids="hash")
    assert name in published_names()
    assert len(loaded) == count
    assert offsets(loaded)[-1] == rows
    assert {(t.dim, t.optimizer, t.ids.kind) for t in loaded} == {(16, "sgd", "hash")}


def test_a_file_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(
        "defaults: {dim: 32, dtype: fp16}\n"
        "tables:\n"
        "  - {name: a, rows: 10, features: [x, y]}\n"
        "  - {name: b, dim: 8, ids: {kind: vocab, min_count: 3, missing: -1}}\n"
    )
    assert load_tables(path, dim=99, optimizer="adam") == (
        Table("a", 10, 32, "fp16", "adam", features=("x", "y")),
        Table("b", 0, 8, "fp16", "adam", ids=IdRule("vocab", 3, "-1")),
    )


def test_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text('[{"name": "a", "rows": 10, "ids": "hash"}]')
    assert load_tables(path) == (Table("a", 10, ids=IdRule("hash")),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a, rows: 0}", ["line 1", "rows", "0"]),
        ("- {name: a, rows: ten}", ["line 1", "rows", "'ten'"]),
        ("- {name: a, rows: 1}\n- {name: a, rows: 2}", ["line 2", "second table 'a'"]),
        ("- {name: a, rows: 1, dtype: fp64}", ["line 1", "dtype", "fp64", "fp16"]),
        ("- {name: a, rows: 1, colour: red}", ["line 1", "colour"]),
        ("- {rows: 1}", ["line 1", "name"]),
        ("- {name: a, ids: hash}", ["line 1", "'a'", "rows"]),
        ("- {name: a, rows: 5, ids: random}", ["line 1", "ids", "random"]),
        ("- {name: a, rows: 5, ids: {kind: vocab, min_count: 0}}", ["min_count", "0"]),
        ("tables: []", ["tables"]),
        ("table:\n- {name: a, rows: 1}", ["line 1", "table"]),
        ("- {name: a\n", ["line"]),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(text)
    with pytest.raises(OperError) as raised:
        load_tables(path)
    for word in ["tables.yaml", *words]:
        assert word in str(raised.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OperError, match="criteo-kaggle"):
        load_tables("criteo")


def test_missing_fills_only_rules_without_one() -> None:
    given_tables = (Table("a", 1), Table("b", 1, ids=IdRule(missing="0")))
    assert [t.ids.missing for t in with_missing(given_tables, "-1")] == ["-1", "0"]


def test_tables_of_torchrec_modules() -> None:
    torch = pytest.importorskip("torch")
    torchrec = pytest.importorskip("torchrec")
    optim = pytest.importorskip("torchrec.optim")
    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name="a",
                num_embeddings=10,
                embedding_dim=8,
                feature_names=["x", "y"],
                pooling=torchrec.PoolingType.MEAN,
                data_type=torchrec.modules.embedding_configs.DataType.FP16,
            )
        ]
    )
    plain = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(
                name="b", num_embeddings=4, embedding_dim=4, feature_names=["z"]
            )
        ]
    )
    optim.apply_optimizer_in_backward(torch.optim.Adam, bags.parameters(), {"lr": 0.1})
    module = torch.nn.Sequential(bags, torch.nn.Sequential(plain))
    assert tables_of(module, optimizer="sgd") == (
        Table("a", 10, 8, "fp16", "adam", "mean", ("x", "y")),
        Table("b", 4, 4, "fp32", "sgd", "none", ("z",)),
    )
    with pytest.raises(OperError, match="no TorchRec"):
        tables_of(torch.nn.Linear(1, 1))
    with pytest.raises(OperError, match="'b'"):
        tables_of(torch.nn.ModuleList([plain, torch.nn.Sequential(_copy(plain))]))


def _copy(module: object) -> object:
    import copy

    return copy.deepcopy(module)
