"""The halves of a step, and its moves, which carry what was counted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.scheduler import transmissions as m
from oper.scheduler.cache import Caches
from oper.scheduler.cache_settings import EVICTIONS, Synchronisation

WORKERS, CAPACITY = 3, 12
batches = st.lists(  # rows of each worker, of batches
    st.lists(st.lists(st.integers(0, 39), max_size=10), min_size=WORKERS, max_size=WORKERS),
    min_size=1,
    max_size=12,
)
SYNCS = ("bsp", "on-demand", "peer", "het:2", "het-exact:0", "het-exact:2", "het")


def make(eviction: str, sync: str) -> Caches:
    made = Caches(WORKERS, [CAPACITY], [8], [4], eviction, Synchronisation.parse(sync))
    made.record_moves()
    return made


def look_up(caches: Caches, rows: list[list[int]]):
    ends = np.cumsum([0, *map(len, rows)])
    flat = np.array([row for of_worker in rows for row in of_worker], dtype=np.int64)
    return caches.look_up(flat, ends)


@given(batches, st.sampled_from(SYNCS), st.sampled_from(EVICTIONS))
def test_halves_of_a_step_are_the_step_and_moves_are_what_it_counts(log, sync, eviction) -> None:
    whole, halves = make(eviction, sync), make(eviction, sync)
    order = np.arange(WORKERS)
    place_of: list[dict[int, int]] = [{} for _ in range(WORKERS)]
    for rows in log:
        expected = whole.train(look_up(whole, rows), order)
        found = halves.read(look_up(halves, rows), order)
        second = halves.update()
        for name in expected.dtype.names or ():
            assert (expected[name] == found[name] + second[name]).all(), name
        moves = halves.take_moves()
        assert (moves == whole.take_moves()).all()
        for worker in range(WORKERS):
            mine = moves[moves["worker"] == worker]
            kinds = mine["kind"]
            pushed = int((kinds <= m.PUSH_GRADIENT).sum())
            assert pushed == expected["update_push"][worker] + expected["evict_push"][worker]
            assert int((kinds == m.PULL).sum()) == expected["miss_pull"][worker]
            sent = (moves["kind"] == m.PEER) & (moves["other"] == worker)
            assert int(sent.sum()) == expected["peer_push"][worker]
            for move in mine[kinds == m.INSERT]:
                # It takes the place of a row that was there, or a free one.
                if move["other"] < 0:
                    assert len(place_of[worker]) < CAPACITY
                else:
                    del place_of[worker][int(move["other"])]
                place_of[worker][int(move["row"])] = int(move["address"])
            read = set(rows[worker])
            assert read <= set(place_of[worker].values())
            numbers = halves.numbers(np.array(sorted(read), dtype=np.int64))
            assert [place_of[worker][int(n)] for n in numbers] == sorted(read)


@given(batches, st.sampled_from(SYNCS))
def test_rows_that_the_tier_trained_are_pulled_again(log, sync) -> None:
    caches, order = make("lru", sync), np.arange(WORKERS)
    for rows in log:
        caches.train(look_up(caches, rows), order)
        union = np.unique([row for of_worker in rows for row in of_worker]).astype(np.int64)
        caches.settle(union)
        moved = caches.read(look_up(caches, rows), order)  # and not trained
        distinct = [len(set(of_worker)) for of_worker in rows]
        assert moved["miss_pull"].tolist() == distinct
        assert moved["wrong_reads"].sum() == 0
        assert moved["update_push"].sum() == moved["evict_push"].sum() == 0


@given(batches, st.sampled_from(SYNCS), st.sampled_from(EVICTIONS), st.randoms())
def test_rows_at_other_addresses_are_the_rows_that_they_were(log, sync, eviction, random) -> None:
    """Some rows change places after each batch; in caches whose rows stay they are only pushed."""
    still, moved = make(eviction, sync), make(eviction, sync)
    order, where = np.arange(WORKERS), np.arange(40)  # the address of each row

    def assert_same_moves() -> None:
        expected, found = still.take_moves(), moved.take_moves()
        expected["address"] = where[expected["address"]]
        assert (expected == found).all()

    for rows in log:
        read = [[int(where[row]) for row in of_worker] for of_worker in rows]
        expected = still.train(look_up(still, rows), order)
        assert (expected == moved.train(look_up(moved, read), order)).all()
        assert_same_moves()
        chosen = np.array(random.sample(range(40), 9))
        free = sorted({*range(60)} - {*where.tolist()} | {*where[chosen].tolist()})
        places = np.array(random.sample(free, 9))
        expected = still.move(chosen, chosen)
        assert (expected == moved.move(where[chosen], places)).all()
        assert_same_moves()  # at the old addresses
        where[chosen] = places
        assert (still.numbers(np.arange(40)) == moved.numbers(where)).all()
        others = np.setdiff1d(np.arange(60), where)
        assert (moved.numbers(others) == -1).all()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1, 1], [5, 6], "from: 1 is there twice"),
        ([1, 2], [5, 5], "to: 5 is there twice"),
        ([1, 2], [5, 3], "to: 3 is the address of a row that stays"),
        ([1], [1 << 56], "of another width"),
        ([1, 2], [5], "to: "),
    ],
)
def test_rows_cannot_be_moved_there(before, after, message) -> None:
    caches = make("lru", "on-demand")
    caches.train(look_up(caches, [[1], [2], [3]]), np.arange(WORKERS))
    known = caches.numbers(np.arange(10))
    with pytest.raises((ValueError, IndexError), match=message):
        caches.move(np.array(before), np.array(after))
    assert (caches.numbers(np.arange(10)) == known).all()
    assert caches.flush()["update_push"].sum() == 3


def test_a_batch_is_trained_once() -> None:
    caches = make("lru", "on-demand")
    with pytest.raises(ValueError, match="no batch was read"):
        caches.update()
    caches.read(look_up(caches, [[1], [2], [3]]), np.arange(WORKERS))
    caches.update()
    with pytest.raises(ValueError, match="no batch was read"):
        caches.update()


def test_a_batch_that_was_read_and_not_trained_changes_nothing_in_the_tier() -> None:
    caches = make("lru", "on-demand")
    caches.read(look_up(caches, [[1], [2], [3]]), np.arange(WORKERS))
    caches.read(look_up(caches, [[1], [2], [3]]), np.arange(WORKERS))
    assert caches.flush()["update_push"].sum() == 0


def test_wild_addresses() -> None:
    caches = make("lru", "on-demand")
    caches.train(look_up(caches, [[1], [2], [3]]), np.arange(WORKERS))
    unknown = np.array([-1, 1 << 62, 7, 0], dtype=np.int64)
    assert caches.numbers(unknown).tolist() == [-1] * 4
    assert caches.settle(unknown)["update_push"].sum() == 0
    for wrong in (torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises((ValueError, TypeError)):
            caches._states.settle(wrong)
        with pytest.raises((ValueError, TypeError)):
            caches._states.numbers(wrong)
