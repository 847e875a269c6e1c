"""Settings of caches: what is refused, and what their sizes mean."""

import pytest

from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"evict": "fifo"}, "evict 'fifo': one of lru"),
        ({"sync": "never"}, "sync 'never': bsp"),
        ({"sync": "fae:1%"}, "without caches"),
        ({"size": "0%"}, "size '0%': more than 0"),
        ({"size": "-1GB"}, "size"),
        ({"size": "much"}, "size"),
    ],
)
def test_what_is_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(OperError, match=text):
        CacheSettings(**settings)


@pytest.mark.parametrize(("size", "bytes"), [("10%", 100), ("100%", 1000), ("4KB", 4000)])
def test_sizes(size: str, bytes: int) -> None:
    assert CacheSettings(size).bytes_of(1000) == pytest.approx(bytes)
