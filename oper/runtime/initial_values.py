"""The initial values of tables: a function of the seed, the table's name and the row.

A plan decides where rows are, and must not decide their values. So rows are made in blocks, each by
the table's own function with a generator that is seeded by a hash of seed, table and block; any
rank can make any block.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from oper.base.errors import OperError
from oper.tables.table import Table

Fill = Callable[[Tensor], object]

BLOCK_ROWS = 65_536

# Functions of torch.nn.init that draw each value by itself, whatever the tensor's shape.
_BY_VALUE = (
    torch.nn.init.uniform_,
    torch.nn.init.normal_,
    torch.nn.init.trunc_normal_,
    torch.nn.init.constant_,
    torch.nn.init.ones_,
    torch.nn.init.zeros_,
)


def block_rows(fill: Fill | None, table: Table) -> int:
    """How many rows of a table are made at once.

    TorchRec hands a config's `init_fn` the whole table, and it may look at the shape, count rows or
    copy trained ones. Only functions that are known to draw each value by itself, which are those
    of torch.nn.init, alone or in a functools.partial, get BLOCK_ROWS; others get the whole table.
    """
    function = fill.func if isinstance(fill, functools.partial) else fill
    return BLOCK_ROWS if fill is None or function in _BY_VALUE else max(table.rows, 1)


def initial_rows(fill: Fill | None, table: Table, seed: int, first: int, count: int) -> Tensor:
    """The initial values of rows [first, first + count) of a table, float32 [count, dim].

    Args:
        fill: writes values into a tensor [n, dim] that it is given, drawing from torch's global
            generator, which is left as it was: a TorchRec config's `init_fn`. None is uniform in
            ±√(1/rows), TorchRec's default.
        seed: equal on all ranks.

    Raises:
        OperError: `fill` raised, with the table's name.
    """
    if fill is None:
        bound = math.sqrt(1 / max(table.rows, 1))
        fill = functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
    rows = torch.empty(count, table.dim)
    step = block_rows(fill, table)
    for begin in range(first - first % step, first + count, step):
        block, end = begin // step, min(begin + step, table.rows)
        low, high = max(begin, first), min(end, first + count)
        if (begin, end) == (low, high):
            _fill_block(fill, table, seed, block, rows[low - first : high - first])
        else:
            whole = torch.empty(end - begin, table.dim)
            _fill_block(fill, table, seed, block, whole)
            rows[low - first : high - first] = whole[low - begin : high - begin]
    return rows


def _fill_block(fill: Fill, table: Table, seed: int, block: int, rows: Tensor) -> None:
    key = hashlib.blake2b(f"{seed} {block} {table.name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(key, "little"))
        try:
            fill(rows)
        except Exception as error:
            raise OperError(
                f"table {table.name!r}: its init_fn failed on float32 {list(rows.shape)}: {error}"
            ) from error
