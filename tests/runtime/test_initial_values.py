"""First values of tables: equal on all ranks and for any rows, by the table's own function."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.runtime import initial_values
from oper.runtime.initial_values import BLOCK_ROWS, block_rows, initial_rows
from oper.tables.table import Table

TABLE = Table("t", 2 * BLOCK_ROWS + 100, dim=3)
NORMAL = functools.partial(torch.nn.init.normal_, mean=5.0)


def number_rows(rows):
    """A function that needs to be handed the whole table."""
    rows.copy_(torch.arange(len(rows))[:, None].expand_as(rows))


def bad(rows):
    raise RuntimeError("no such file")


FILLS = [None, NORMAL, torch.nn.init.ones_, number_rows, torch.nn.init.xavier_uniform_]


@pytest.fixture(scope="module")
def whole():
    return {fill: initial_rows(fill, TABLE, 7, 0, TABLE.rows) for fill in FILLS}


@given(fill=st.sampled_from(FILLS), cuts=st.lists(st.integers(0, TABLE.rows), max_size=3))
def test_any_part_is_part_of_the_whole(whole, fill, cuts):
    ends = sorted([0, *cuts, TABLE.rows])
    for first, last in itertools.pairwise(ends):
        part = initial_rows(fill, TABLE, 7, first, last - first)
        assert torch.equal(part, whole[fill][first:last])


def test_default_is_torchrecs():
    rows = initial_rows(None, TABLE, 0, 0, TABLE.rows)
    bound = math.sqrt(1 / TABLE.rows)
    assert rows.dtype == torch.float32
    assert rows.abs().max() <= bound
    # Standard deviations of the mean of n uniform values, and of their mean square.
    n = rows.numel()
    assert abs(rows.double().mean()) < 4 * bound / math.sqrt(3 * n)
    assert abs(rows.double().square().mean() / bound**2 - 1 / 3) < 4 * math.sqrt(4 / 45 / n)


def test_seed_table_and_block_all_count():
    n = 1000
    rows = initial_rows(None, TABLE, 0, 0, n)
    others = [
        initial_rows(None, TABLE, 1, 0, n),
        initial_rows(None, Table("u", TABLE.rows, dim=3), 0, 0, n),
        initial_rows(None, TABLE, 0, BLOCK_ROWS, n),
        initial_rows(None, TABLE, 0, n, n),
    ]
    for other in others:
        assert (rows == other).float().mean() < 0.01


def test_values_do_not_depend_on_the_process():
    # Of torch's Mersenne Twister, seeded by a hash that is the same everywhere.
    third = initial_rows(None, Table("t", 4, dim=1), 3, 2, 1)
    assert third.item() == pytest.approx(0.31057096)


def test_generator_of_the_user_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initial_rows(NORMAL, TABLE, 0, 0, 10)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(OperError):
        initial_rows(bad, TABLE, 0, 0, 10)
    assert torch.initial_seed() == 5


def test_failing_function_is_named():
    with pytest.raises(OperError, match=r"table 't': its init_fn failed .*\[131172, 3\].*no such"):
        initial_rows(bad, TABLE, 0, 0, 10)


def test_functions_get_what_torchrec_gives_them():
    assert block_rows(NORMAL, TABLE) == block_rows(None, TABLE) == BLOCK_ROWS
    assert block_rows(number_rows, TABLE) == TABLE.rows
    numbered = initial_rows(number_rows, TABLE, 0, BLOCK_ROWS - 1, 3)
    assert numbered[:, 0].tolist() == [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1]
    bound = math.sqrt(6 / (TABLE.rows + TABLE.dim))
    assert initial_rows(torch.nn.init.xavier_uniform_, TABLE, 0, 0, 999).abs().max() <= bound


def test_configs_of_torchrec():
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    common = {"name": "t", "num_embeddings": 1000, "embedding_dim": 4, "feature_names": ["f"]}
    table = Table("t", 1000, dim=4)
    plain = configs.EmbeddingBagConfig(**common)
    assert torch.equal(
        initial_rows(plain.init_fn, table, 0, 0, 1000), initial_rows(None, table, 0, 0, 1000)
    )
    bounded = configs.EmbeddingBagConfig(**common, weight_init_min=2.0, weight_init_max=3.0)
    rows = initial_rows(bounded.init_fn, table, 0, 0, 1000)
    assert 2 <= rows.min() < 2.1
    assert 2.9 < rows.max() <= 3
    assert block_rows(bounded.init_fn, table) == BLOCK_ROWS


def test_memory_is_a_block_at_a_time(monkeypatch):
    """A large table is made in blocks, without a copy where a block is asked for whole."""
    sizes = []

    def record(fill, table, seed, block, rows):
        sizes.append(len(rows))

    monkeypatch.setattr(initial_values, "_fill_block", record)
    initial_rows(None, TABLE, 0, BLOCK_ROWS, BLOCK_ROWS)
    initial_rows(None, TABLE, 0, 0, TABLE.rows)
    assert sizes == [BLOCK_ROWS, BLOCK_ROWS, BLOCK_ROWS, 100]
