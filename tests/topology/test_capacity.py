"""Capacities: what their errors advise."""

import re

import pytest

from oper.base.errors import OperError
from oper.topology.capacity import rank_capacities


@pytest.mark.parametrize(("total", "words"), [(4096, "enough is 4096"), (4097, "at most 4,096")])
def test_more_ranks_than_a_topology_may_have_are_not_advised(total: int, words: str) -> None:
    row, ranks = 260, 2
    with pytest.raises(OperError, match=words) as refused:
        rank_capacities((row, row), ranks, total * row, 0.0, [row])
    if total > 4096:
        advised = re.search("to ([0-9,]+) bytes a rank", str(refused.value))
        assert advised is not None
        least = int(advised[1].replace(",", ""))
        assert rank_capacities((least, least), ranks, total * row, 0.0, [row]) == [least] * 2
