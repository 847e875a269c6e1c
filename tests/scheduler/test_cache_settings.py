"""Settings of caches: what is refused, and what their sizes mean."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.scheduler.cache import least_bytes, split
from oper.scheduler.cache_settings import CacheSettings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"evict": "fifo"}, "evict: expected one of lru.*got 'fifo'"),
        ({"sync": "never"}, "sync='never': expected bsp"),
        ({"sync": "fae:1%"}, "simulated only"),
        ({"size": "0%"}, "size: expected more than 0.*got '0%'"),
        ({"size": "-1GB"}, "size"),
        ({"size": "much"}, "size"),
        ({"size": 0.1}, "size: expected a text, such as '10%', got float"),
        ({"sync": None}, "sync: expected a text.*got NoneType"),
        ({"evict": None}, "evict: expected a text.*got NoneType"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(OperError, match=text):
        CacheSettings(**settings)


@pytest.mark.parametrize(("size", "bytes"), [("10%", 100), ("100%", 1000), ("4KB", 4000)])
def test_sizes(size: str, bytes: int) -> None:
    assert CacheSettings(size).bytes_of(1000) == pytest.approx(bytes)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 60), st.integers(1, 900), st.integers(0, 99)),
        min_size=1,
        max_size=5,
    )
)
def test_the_least_bytes_that_hold_a_batch(widths) -> None:
    columns = np.array(widths, dtype=np.int64).T
    needed, asked, row_bytes, more = columns
    least = least_bytes(needed, asked, row_bytes)
    assert (split(least, asked, needed + more, row_bytes) >= needed).all()
    smaller = split(least - int(np.maximum(asked, 1) @ row_bytes), asked, needed + more, row_bytes)
    assert (smaller < needed).any()
