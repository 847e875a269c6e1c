"""Caches against the state model, and against what a read may lack."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.scheduler.cache import Caches
from oper.scheduler.cache_settings import EVICTIONS, Synchronisation
from oper.scheduler.row_addresses import WIDTH_SHIFT
from oper.scheduler.transmissions import TRANSMISSIONS
from tests.scheduler.staleness_model import StalenessModel
from tests.scheduler.state_model import StateModel
from tests.support.examples import examples

EXAMPLES = examples(60)
ROWS = 40


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """Batches with their assignments: few rows, so that rows are hot, shared and evicted dirty."""
    workers = draw(st.sampled_from([1, 2, 3, 8, 64]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    m, ids = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    skew = draw(st.sampled_from([0.5, 2.0, 8.0]))
    iterations = draw(st.integers(1, 25))
    batches = [
        [
            (ROWS * random.random(random.integers(0, ids + 1)) ** skew).astype(int).tolist()
            for _ in range(workers * m)
        ]
        for _ in range(iterations)
    ]
    assignments = [
        random.permutation(np.repeat(np.arange(workers), m)).tolist() for _ in range(iterations)
    ]
    capacity = max(m * ids, draw(st.sampled_from([1, 5, 20, ROWS])))
    return {
        "workers": workers,
        "capacity": capacity,
        "batches": list(zip(batches, assignments, strict=True)),
    }


def caches_of(trace: dict[str, Any], eviction: str, sync: str) -> Caches:
    parsed = Synchronisation.parse(sync)
    return Caches(trace["workers"], [trace["capacity"]], [64], [64], eviction, parsed)


def looked_up(caches: Caches, samples: list[list[int]], base: int = 0) -> Any:
    flat = np.array([row for sample in samples for row in sample], dtype=np.int64) + base
    return caches.look_up(flat, np.cumsum([0, *map(len, samples)]))


def train(caches: Caches, samples: list[list[int]], assignment: list[int]) -> Any:
    return caches.train(looked_up(caches, samples), np.array(assignment, dtype=np.int64))


@EXAMPLES
@given(traces(), st.sampled_from(["lru", "lfu", "emark"]), st.booleans())
def test_transmissions_are_those_of_the_state_model(
    trace: dict[str, Any], eviction: str, on_demand: bool
) -> None:
    caches = caches_of(trace, eviction, "on-demand" if on_demand else "bsp")
    model = StateModel(trace["workers"], trace["capacity"], on_demand, eviction)
    for samples, assignment in trace["batches"]:
        moved = train(caches, samples, assignment)
        names = ("miss_pull", "update_push", "evict_push", "hits")
        found = np.stack([moved[name] for name in names], axis=1)
        assert found.tolist() == model.iteration(samples, assignment)


@EXAMPLES
@given(
    traces(),
    st.sampled_from(["het", "het:0", "het:2", "het:inf", "het-exact:0", "het-exact:3"]),
)
def test_transmissions_and_lags_are_those_of_the_staleness_model(
    trace: dict[str, Any], sync: str
) -> None:
    caches, parsed = caches_of(trace, "lru", sync), Synchronisation.parse(sync)
    model = StalenessModel(trace["workers"], trace["capacity"], parsed)
    for samples, assignment in trace["batches"]:
        moved = train(caches, samples, assignment)
        names = ("miss_pull", "update_push", "evict_push", "hits", "wrong_reads", "lag")
        found = np.stack([moved[name] for name in names], axis=1)
        assert found.tolist() == model.iteration(samples, assignment)
    if parsed.kind != "het-printed":
        assert model.most_weight <= (trace["workers"] + 1) * parsed.staleness


@pytest.mark.parametrize(
    ("readers", "steps"), [(1, 101), (2, 51), (3, 34), (33, 4), (50, 3), (100, 2), (101, 1)]
)
def test_the_staleness_falls_with_the_share_of_samples_that_read_the_row(
    readers: int, steps: int
) -> None:
    """Of 1,000 samples, on one of two workers: it pushes once its updates are more than 100, or
    more than a tenth of a batch."""
    caches = Caches(2, [4], [64], [64], "lru", Synchronisation.parse("het"))
    samples: list[list[int]] = [[7]] * readers + [[]] * (1000 - readers)
    assignment = [0] * 500 + [1] * 500
    pushes = [train(caches, samples, assignment)["update_push"].tolist() for _ in range(2 * steps)]
    assert pushes == 2 * [*[[0, 0]] * (steps - 1), [1, 0]]


@EXAMPLES
@given(traces(), st.sampled_from(EVICTIONS))
def test_rows_that_a_tenth_of_the_samples_reads_are_synchronous(
    trace: dict[str, Any], eviction: str
) -> None:
    caches = caches_of(trace, eviction, "het")
    for samples, assignment in trace["batches"]:
        # In batches of fewer than ten samples every row that is read is one of them.
        moved = train(caches, samples[:9], assignment[:9])
        assert moved["wrong_reads"].sum() == moved["lag"].sum() == 0


@EXAMPLES
@given(
    traces(),
    st.sampled_from(EVICTIONS),
    st.sampled_from(["bsp", "on-demand", "peer", "het-exact:0"]),
)
def test_no_read_lacks_an_update_of_an_earlier_iteration(
    trace: dict[str, Any], eviction: str, sync: str
) -> None:
    caches = caches_of(trace, eviction, sync)
    for samples, assignment in trace["batches"]:
        assert train(caches, samples, assignment)["wrong_reads"].sum() == 0


@EXAMPLES
@given(traces(), st.sampled_from(EVICTIONS), st.integers(1, 6))
def test_a_read_lacks_at_most_the_bound(trace: dict[str, Any], eviction: str, s: int) -> None:
    caches = caches_of(trace, eviction, f"het-exact:{s}")
    for samples, assignment in trace["batches"]:
        assert train(caches, samples, assignment)["lag"].max() <= (trace["workers"] + 1) * s


def test_the_printed_protocol_reads_wrong_values_even_at_zero_staleness() -> None:
    # One row, trained by the workers in turn: none pushes before it reads the row again.
    caches = Caches(2, [4], [64], [64], "lru", Synchronisation.parse("het:0"))
    wrong = [train(caches, [[7], []], [n % 2, 1 - n % 2])["wrong_reads"].sum() for n in range(20)]
    assert wrong == [0] + [1] * 19


def test_pushes_of_all_workers_come_before_a_read() -> None:
    # One row, trained by both workers in every iteration: each pushes before it reads it again.
    caches = Caches(2, [4], [64], [64], "lru", Synchronisation.parse("het:0"))
    moved = [train(caches, [[7], [7]], [0, 1]) for _ in range(20)]
    assert sum(of_step["update_push"].sum() for of_step in moved) == 2 * 19
    assert sum(of_step["wrong_reads"].sum() for of_step in moved) == 0


@EXAMPLES
@given(
    traces(),
    st.sampled_from(EVICTIONS),
    st.sampled_from(["on-demand", "peer", "het-exact:3", "het"]),
)
def test_after_a_flush_the_tier_has_everything(
    trace: dict[str, Any], eviction: str, sync: str
) -> None:
    caches = caches_of(trace, eviction, sync)
    for samples, assignment in trace["batches"]:
        train(caches, samples, assignment)
    caches.flush()
    assert caches.flush()["update_push"].sum() == 0
    if sync in ("het-exact:3", "het"):
        return  # whose copies may be behind the tier
    for row in range(ROWS):
        for worker in range(trace["workers"]):
            samples = [[row] if w == worker else [] for w in range(trace["workers"])]
            moved = train(caches, samples, list(range(trace["workers"])))
            assert moved["wrong_reads"].sum() == 0
            assert moved["update_push"].sum() <= 1  # of the worker before


def test_scores_and_costs_are_those_of_the_states() -> None:
    caches = Caches(3, [10], [100], [40], "lru", Synchronisation.parse("on-demand"))
    # Row 1 is the latest in worker 0 alone, 2 partial in workers 1 and 2, 3 unknown.
    train(caches, [[1], [2], [2]], [0, 1, 2])
    batch = looked_up(caches, [[1, 2, 3], [1, 1], []])
    assert caches.latest_rows(batch).tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    seconds = np.array([1.0, 10.0, 100.0])
    # Row 1: worker 0 would have to push it for the others. Row 2 is pushed whoever trains it.
    expected = [
        [200.0, 3 * 1000 + 100, 3 * 10000 + 100],
        [0.0, 1000 + 100, 10000 + 100],
        [0.0, 0.0, 0.0],
    ]
    assert caches.expected_costs(batch, seconds).tolist() == expected
    moved = caches.train(batch, np.array([1, 2, 0]))
    # Both 1 and 2 are pushed; worker 1 pulls three rows, worker 2 one.
    assert moved["update_push"].tolist() == [1, 1, 1]
    assert moved["push_bytes"].tolist() == [100, 40, 40]
    assert moved["pull_bytes"].tolist() == [0, 300, 100]


def test_widths_have_capacities_of_their_own() -> None:
    caches = Caches(1, [1, 2], [8, 80], [8, 80], "lru", Synchronisation.parse("on-demand"))
    wide = 1 << WIDTH_SHIFT
    for rows, pulls, evictions in (
        ([1, wide + 1, wide + 2], 3, 0),
        ([1, wide + 1], 0, 0),
        ([2], 1, 1),  # of the narrow ones
        ([wide + 3], 1, 1),  # wide + 2 was used least recently
        ([wide + 1, wide + 3], 0, 0),
    ):
        batch = caches.look_up(np.array(rows), np.array([0, len(rows)]))
        moved = caches.train(batch, np.array([0]))
        assert (moved["miss_pull"][0], moved["evict_push"][0]) == (pulls, evictions)


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    caches = Caches(2, [2], [8], [8], "lru", Synchronisation.parse("on-demand"))
    batch = looked_up(caches, [[1, 2, 3], [4]])
    for _ in range(2):
        with pytest.raises(
            OperError, match=r"worker 1 trains 3 rows .* and its cache has room for 2"
        ):
            caches.train(batch, np.array([1, 0]))
    out_of_turn = looked_up(caches, [[1, 2], [4]])
    with pytest.raises(ValueError, match="not those of the next batch"):
        caches.train(out_of_turn, np.array([0, 1]))


def test_wild_arguments_are_refused() -> None:
    caches = Caches(2, [9], [8], [8], "lru", Synchronisation.parse("on-demand"))
    batch = looked_up(caches, [[1, 2], [4]])
    states = caches._states
    good = torch.tensor([0, 1])
    for rows, offsets in (
        (batch.rows + 3, batch.offsets),
        (batch.rows - 1, batch.offsets),
        (batch.rows.long(), batch.offsets),
        (batch.rows[:2], batch.offsets),
        (batch.rows, batch.offsets.flip(0)),
        (batch.rows, batch.offsets[:0]),
        (batch.rows, batch.offsets.int()),
    ):
        with pytest.raises((ValueError, IndexError, TypeError)):
            states.latest_rows(rows, offsets)
        with pytest.raises((ValueError, IndexError, TypeError)):
            states.train(rows, offsets, good)
    for assignment in (good + 1, good - 1, good[:1], good.int(), good.double()):
        with pytest.raises((ValueError, IndexError, TypeError)):
            states.train(*batch[:2], assignment)
    for addresses, offsets in (
        ([1 << WIDTH_SHIFT], [0, 1]),
        ([-1], [0, 1]),
        ([1], [0, 2]),
        ([1], [1, 1]),
        ([1], []),
    ):
        with pytest.raises((ValueError, IndexError)):
            states.look_up(torch.tensor(addresses), torch.tensor(offsets, dtype=torch.int64))
    assert states.train(*batch[:2], good).shape == (2, len(TRANSMISSIONS.names or ()))


def test_rows_of_a_batch_that_was_trained_may_be_forgotten() -> None:
    caches = Caches(1, [1], [8], [8], "lru", Synchronisation.parse("on-demand"))
    old = looked_up(caches, [[1]])
    caches.train(old, np.array([0]))
    train(caches, [[2]], [0])  # row 1 leaves the cache, and nobody else has it
    with pytest.raises(ValueError, match="forgotten"):
        caches.latest_rows(old)
    with pytest.raises(ValueError, match="forgotten"):
        caches.expected_costs(old, np.ones(1))
    with pytest.raises(ValueError, match="forgotten"):
        caches.group(old, np.array([0]), np.ones(1))


@pytest.mark.parametrize("eviction", ["lru", "emark"])
@pytest.mark.parametrize("sync", ["on-demand", "het-exact:3"])
def test_states_stay_those_of_their_rows_while_more_rows_come(eviction: str, sync: str) -> None:
    """Arrays of rows and copies move to other memory several times meanwhile."""
    rows, batch = 60_000, 1500
    caches = Caches(3, [rows], [8], [8], eviction, Synchronisation.parse(sync))
    batches = np.arange(rows).reshape(-1, 3, batch // 3).tolist()
    for samples in batches:
        train(caches, samples, [0, 1, 2])
    for samples in batches:
        moved = train(caches, samples, [0, 1, 2])
        assert moved["hits"].tolist() == moved["reads"].tolist() == [batch // 3] * 3
        assert moved["wrong_reads"].sum() == moved["lag"].sum() == 0


def test_rows_that_were_changed_after_their_look_up_are_refused() -> None:
    caches = Caches(1, [9], [8], [8], "lru", Synchronisation.parse("on-demand"))
    batch = looked_up(caches, [[1, 2]])
    assert caches.latest_rows(batch).tolist() == [[0]]
    batch.rows.numpy()[0] = 1_000_000  # which torch does not see
    with pytest.raises(IndexError):
        caches.latest_rows(batch)
    with pytest.raises(IndexError):
        caches._states.train(*batch[:2], torch.tensor([0]))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_rows_that_nobody_caches_take_no_room(eviction: str) -> None:
    caches = Caches(2, [4], [8], [8], eviction, Synchronisation.parse("on-demand"))
    for n in range(200):  # rows that never come again
        train(caches, [[4 * n, 4 * n + 1], [4 * n + 2, 4 * n + 3]], [0, 1])
    assert int(looked_up(caches, [[10_000]]).rows.max()) < 20
    assert len(caches.cached()[0]) == 8


def test_light_lfu_does_not_freeze() -> None:
    caches = Caches(1, [4], [8], [8], "light-lfu", Synchronisation.parse("bsp"))
    for _ in range(40):
        train(caches, [[0, 1, 2, 3]], [0])
    for _ in range(60):  # other rows from now on
        train(caches, [[4, 5, 6, 7]], [0])
    assert train(caches, [[4, 5, 6, 7]], [0])["hits"][0] == 4


@pytest.mark.parametrize(
    "text",
    [
        "bsp:1",
        "het:",
        "het-exact",
        "het:-1",
        "het:1.5",
        "on-demand:",
        "",
        "het-exact:x",
        "het:" + "9" * 30,
    ],
)
def test_synchronisations_that_are_none(text: str) -> None:
    with pytest.raises(OperError, match=r"`sync`|sync="):
        Synchronisation.parse(text)


@pytest.mark.parametrize(
    "text", ["bsp", "on-demand", "peer", "het", "het:0", "het:inf", "het-exact:100", "fae:1%"]
)
def test_synchronisations_are_written_as_they_are_read(text: str) -> None:
    assert str(Synchronisation.parse(text)) == text
