"""Capacities: what their errors advise."""

import re

import pytest

from oper.base.errors import OperError
from oper.topology.capacity import device_capacities, rank_capacities
from oper.topology.transports import STAGE_BYTES, TRANSPORTS


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


@pytest.mark.parametrize("transport", [None, *TRANSPORTS])
def test_symmetric_memory_is_the_smallest_devices(transport: str | None) -> None:
    """NVSHMEM gives each rank as much as the one that has the most rows."""
    found = device_capacities([10**9, 5 * 10**8, 2 * 10**9], 0.2, 1e6, transport)  # type: ignore[arg-type]
    if transport == "nvshmem":
        assert found == [4 * 10**8 - 10**6 - STAGE_BYTES] * 3
    else:
        assert found == [8 * 10**8 - 10**6, 4 * 10**8 - 10**6, 16 * 10**8 - 10**6]
