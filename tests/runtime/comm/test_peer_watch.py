"""The watch over ranks whose rows kernels read: who finds one gone tells the others first."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from oper.runtime.comm.lost_ranks import LostRankError
from oper.runtime.comm.peer_watch import PeerWatch

SLOW_SECONDS = 0.3  # less than is waited for a store


class SlowStore:
    """A store that takes its time to be told of a rank that is gone."""

    def __init__(self) -> None:
        self.told = ""
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        if key.endswith("/lost"):
            time.sleep(SLOW_SECONDS)
            self.told = value
        self._values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"0")


def check_until_it_raises(watch: PeerWatch) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        watch.check()
        time.sleep(0.01)


def test_others_are_told_before_a_rank_raises() -> None:
    store, gone = SlowStore(), threading.Event()
    liveness = SimpleNamespace(
        alive=lambda peer: not gone.is_set(), lost=lambda ranks, action: f"rank {ranks[0]} died"
    )
    node: Any = SimpleNamespace(
        rank=0,
        ranks=2,
        peers=(1,),
        liveness=liveness,
        deadline_seconds=60.0,
        group=SimpleNamespace(store=lambda: store, name="of a test"),
        check_all=lambda *texts: None,
    )
    watch = PeerWatch(node, is_busy=lambda: False)
    try:
        watch.check()
        gone.set()
        with pytest.raises(LostRankError, match="rank 1 died"):
            check_until_it_raises(watch)
        assert store.told == "rank 1 died"
    finally:
        watch.stop()
