"""DispatchingLoader on gloo ranks: what moves, what never changes, and what is refused."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import oper
from oper.base.errors import OperError
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.dispatch import Dispatcher
from oper.scheduler.loader.plan_rows import PlanRows
from oper.scheduler.simulator import Methods, SimulationSettings, replay
from oper.scheduler.trace import Trace
from tests.support.runtime import mortal_ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds
from tests.support.scheduler import loader_cases as cases
from tests.support.scheduler.loader_batches import STRUCTURES, TABLES, batch, samples_of

STEPS, M = 4, cases.SAMPLES
POLICIES = ("random", "in-order", "laia", "laia:1", "esd:0", "esd:0.5", "esd", "grouped")


def check_samples(structure: str, ranks: int, found: list[Any], bags: bool = True) -> list[Any]:
    """Check that each global batch has all its samples, M per rank, ascending; return the rank of
    each sample."""
    assignments = []
    for step in range(len(found[0])):
        first = step % STEPS * ranks * M
        given = [str(s) for s in samples_of(batch(structure, first, ranks * M, bags))]
        number = {text: n for n, text in reversed(list(enumerate(given)))}
        rank_of = np.full(ranks * M, -1)
        trained = [[str(s) for s in found[rank][step]] for rank in range(ranks)]
        assert Counter(t for of_rank in trained for t in of_rank) == Counter(given)
        for rank, of_rank in enumerate(trained):
            assert len(of_rank) == M
            numbers = [number[text] for text in of_rank]
            assert numbers == sorted(numbers)
            rank_of[numbers] = rank
        assignments.append(rank_of.tolist())
    return assignments


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "kjt"])
def test_whole_samples_move_in_every_structure(worlds: Worlds, structure: str, ranks: int) -> None:
    results = worlds.run(ranks, cases.dispatched, STEPS, structure, policy="random")
    assignments = check_samples(structure, ranks, [found for found, _ in results])
    worlds.run(ranks, cases.kinds, structure)
    moved = [int((np.array(a).reshape(ranks, M) != [[r] for r in range(ranks)]).sum())
             for a in assignments]  # fmt: skip
    assert sum(c["samples_moved"] for _, c in results) == sum(moved)
    assert (sum(c["bytes_moved"] for _, c in results) > 0) == (ranks > 1)
    assert [c["samples"] for _, c in results] == [STEPS * M] * ranks


def test_weights_move_with_their_ids(worlds: Worlds) -> None:
    results = worlds.run(2, cases.dispatched, 1, "kjt", policy="random")
    expected = []
    for rank in range(2):
        expected += samples_of(batch("kjt", rank * M, M))
    found = [sample for found, _ in results for sample in found[0]]
    assert Counter(map(str, found)) == Counter(map(str, expected))


@pytest.mark.parametrize("policy", [*POLICIES, "locality"])
def test_four_ranks_and_two_epochs(worlds: Worlds, policy: str) -> None:
    results = worlds.run(4, cases.dispatched, STEPS, "tuple", 2, policy=policy)
    assert len(results[0][0]) == 2 * STEPS
    check_samples("tuple", 4, [found for found, _ in results])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_assignment_is_the_simulators(worlds: Worlds, policy: str, tmp_path: Path) -> None:
    samples = samples_of(batch("tuple", 0, STEPS * 2 * M, bags=False))
    columns = {"f0": 2, "f1": 1, "g": 0}  # where the ids are in a sample
    log = pa.table({key: [s[n][0] for s in samples] for key, n in columns.items()})
    pq.write_table(log, tmp_path / "log.parquet")
    opened = open_log(tmp_path / "log.parquet", LogOptions(columns=tuple(columns)))
    trace = Trace(RowReader(opened, prepare(opened, list(TABLES))), 2 * M)
    settings = SimulationSettings(2, 2 * M, 0.5, warm_up=0)
    expected = []

    def assign(self: Dispatcher, *arguments: Any) -> Any:
        expected.append(original(self, *arguments).tolist())
        return np.array(expected[-1])

    original = Dispatcher.assign
    with patch.object(Dispatcher, "assign", assign):
        replay(trace, settings, Methods.parse(policy, "on-demand", "lru"))
    results = worlds.run(
        2, cases.dispatched, STEPS, "tuple", policy=policy, bags=False, cache=CacheSettings("50%"),
        links=[1.25e10] * 2,
    )  # fmt: skip
    assert check_samples("tuple", 2, [found for found, _ in results], False) == expected
    assert policy == "in-order" or expected[1:] != [[0] * M + [1] * M] * (STEPS - 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_locality_serves_most_reads_from_the_own_memory(worlds: Worlds, ranks: int) -> None:
    def local(found: list[Any]) -> int:
        plan, reads = cases.plan_of(ranks), 0
        for rank in range(ranks):
            here = oper.AddressMap.of(plan, rank)
            for given in found[rank]:
                for sample in given:
                    ids = {"narrow": sample[2] + sample[1], "wide": sample[0]}
                    for table, rows in ids.items():
                        wanted = here.translate(table, np.array(rows, dtype=np.int64)) >> 40
                        reads += int((wanted == (1 << 23) - 1).sum())
        return reads

    shares = {}
    for policy in ("in-order", "random", "locality"):
        results = worlds.run(ranks, cases.dispatched, STEPS, "tuple", policy=policy)
        shares[policy] = local([found for found, _ in results])
    assert shares["locality"] > 1.1 * max(shares["in-order"], shares["random"])


def test_addresses_are_one_to_one_and_name_a_holder() -> None:
    plan = random_plan(3, TABLES, 4)
    rows = PlanRows(plan, [0, 1], None)
    seen = []
    for t, table in enumerate(TABLES):
        ids = torch.arange(table.rows)
        addresses = rows.of_rows(ids, np.array([len(ids)]), np.array([t]))
        seen += addresses.tolist()
        maps = [oper.AddressMap.of(plan, rank).translate(t, ids).numpy() for rank in range(4)]
        local = np.stack(maps) >> 40 == (1 << 23) - 1
        assert local[(addresses >> 40) & 0xFFFF, np.arange(table.rows)].all()
        assert (addresses >> 56 == plan.layout.width_of_table[t]).all()
        assert (addresses & (1 << 40) - 1 == maps[0] & (1 << 40) - 1).all()
    assert len(set(seen)) == sum(table.rows for table in TABLES)


FAILURES = {
    "lengths": "the loader of rank 1 ended after 2 batches, and that of rank 0 has more",
    "ragged": "batch 3: expected 6 samples of each rank, .*, got 4 of rank 1",
    "empty": "batch 3: expected 6 samples of each rank, .*, got 0 of rank 1",
    "empty first": "batch 0: expected some samples of each rank, .*, got 0 of rank 0",
    "ragged in the middle": "batch 1 was left out .* ranks 0, 1 went on after it",
    "two fewer, dropped": "batch 2 was left out .* rank 0 went on after it",
    "text": r"\[1\]: rank 0 has 'of rank 0', and rank 1 'of rank 1'",
    "structure": r"\[2\]: rank 0 has samples of  ?torch.float64, and rank 1 nothing",
    "no samples": r"\[1\]: expected .* the batch's 6 samples, got shape \[2\]",
    "type": r"\[1\]: expected KeyedJaggedTensors.*got ndarray",
    "feature": "table 'wide': its feature 'h' is not in the batch, which has g, f1, f0, unused",
    "settings": "rank 1 made the DispatchingLoader with other settings than rank 0",
    "plan": "rank 1 made the DispatchingLoader with .* another plan",
    "other ranks": "the plan is for 3 ranks, and the process group has 2",
    "small cache": "cache '0.1%': batch 0: worker . trains .* bytes would be enough",
}


@pytest.mark.parametrize("what", FAILURES)
def test_all_ranks_say_what_is_wrong(worlds: Worlds, what: str) -> None:
    for found in worlds.run(2, cases.failing, what):
        assert re.search(FAILURES[what], found), found
        assert "OperError" in found or "LostRankError" in found


@pytest.mark.parametrize("what", ["ragged, dropped", "one fewer, dropped"])
def test_an_incomplete_last_batch_is_left_out(worlds: Worlds, what: str) -> None:
    assert worlds.run(2, cases.failing, what) == ["after 3: ended"] * 2


def test_an_error_of_one_ranks_loader_reaches_all(worlds: Worlds) -> None:
    other, own = worlds.run(2, cases.failing, "raises")
    assert own == "after 1: ZeroDivisionError: a worker of the loader died"
    assert other == (
        "after 1: LostRankError: rank 1 failed: ZeroDivisionError: a worker of the loader died"
    )


def test_a_loaders_worker_that_dies_is_told_to_all() -> None:
    other, own = mortal_ranks.run(2, cases.a_worker_dies)
    assert own.startswith("RuntimeError: DataLoader worker (pid")
    assert other.startswith("LostRankError: rank 1 failed: RuntimeError: DataLoader worker (pid")


@pytest.mark.parametrize("policy", ["random", "laia"])
def test_another_assignment_on_one_rank_is_found(worlds: Worlds, policy: str) -> None:
    for text in worlds.run(2, cases.one_seed_differs, policy):
        assert "the ranks assigned its samples differently" in text
        assert "rank 0: " in text
        assert "rank 1: " in text


def test_a_loop_that_is_left_can_be_begun_anew(worlds: Worlds) -> None:
    results = worlds.run(2, cases.leaves_and_comes_again)
    assert sorted(label for labels, _ in results for label in labels) == list(range(2 * M * 8))
    assert [more for _, more in results] == [0, 0]


def test_loaders_of_some_ranks_follow_one_another(worlds: Worlds) -> None:
    assert worlds.run(3, cases.come_and_go_of_some) == [6, 6, 0]


def test_a_rank_that_leaves_alone_is_named(worlds: Worlds) -> None:
    other, own = worlds.run(2, cases.one_leaves)
    assert own == "left"
    assert "rank 1 left the loop over the DispatchingLoader" in other


@pytest.mark.parametrize("kind", ["dies", "stops"])
def test_a_rank_that_is_lost_is_named_within_the_deadline(kind: str) -> None:
    results = mortal_ranks.run(3, cases.dies, kind, silent=(1,))
    for rank in (0, 2):
        text, seconds = results[rank]
        assert "rank 1" in text
        assert "died" in text if kind == "dies" else "did not come within 3 s" in text
        assert seconds < 60  # the process group's timeout is 300 s here


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("policy", ["random", "locality", "esd"])
def test_training_equals_one_process(worlds: Worlds, policy: str, pipelined: bool) -> None:
    assert min(worlds.run(2, cases.trained, policy, pipelined)) > 0


def test_one_rank_trains_what_it_loads() -> None:
    # In processes of its own: TorchRec makes process groups, here on one rank alone.
    assert mortal_ranks.run(1, cases.trained, "esd") == [0]


@pytest.mark.parametrize("policy", ["esd", "laia:2", "laia", "grouped", "locality"])
def test_all_ranks_follow_rank_0s_time(worlds: Worlds, policy: str) -> None:
    first, second = worlds.run(2, cases.paced, policy)
    assert first == second
    assert first[:2] == [1.0, 1.0]
    assert first[-1] < 0.5


def test_only_the_tiers_tables_are_cached_where_there_is_one() -> None:
    plan = random_plan(0, TABLES, 1, tier=(1,))
    loader = oper.DispatchingLoader(
        cases.own_batches(0, 1, 2), plan, policy="esd", cache=CacheSettings("100%")
    )
    assert loader._state.assigner._rows.features == [("g", 1)]  # type: ignore[attr-defined]
    assert len(list(loader)) == len(loader) == 2
    local: Any = oper.DispatchingLoader([], plan, policy="locality")._state.assigner
    assert local._rows.features == [("f0", 0), ("f1", 0), ("g", 1)]


# Imports for two: each rank is forked before there is a thread, and ends as an interpreter does.
_SCRIPT = """
import os, sys, torch.distributed as dist
import oper
from tests.support.scheduler import loader_cases as cases
started = []
for rank in range(2):
    started.append(os.fork())
    if not started[-1]:
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started])
    sys.exit()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
loader = cases.make(rank, dist.group.WORLD, cases.own_batches(rank, 2, 30), policy="locality")
for seen, _ in enumerate(loader):
    if seen == 2:
        break
kept = iter(loader)
next(kept)
"""


def test_a_script_that_ends_in_the_middle_ends_at_once_and_says_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout == "[0, 0]\n"
    assert not [line for line in done.stderr.splitlines() if "is_fx_tracing" not in line]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"policy": "near"}, "policy='near': expected random, in-order, .* or locality"),
        ({"policy": "laia", "alpha": 0.5}, "alpha 0.5: is of policy 'esd'"),
        ({"alpha": 2}, "policy='esd:2'"),
        ({"ahead": 0}, "ahead: expected at least 1 batch, got 0"),
        ({"policy": None}, "policy: expected a name, .*got NoneType"),
        ({"cache": "10%"}, "cache: expected oper.CacheSettings.*got str"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"seed": "x"}, "seed"),
        ({"features": {"a": 3}}, "features of table 'a': expected a list, got 3"),
        ({"features": {"a": "fa"}}, "features of table 'a': expected a list, got 'fa'"),
        ({"links": [1.0, 2.0]}, r"links: expected a bandwidth above 0 .*got \[1.0, 2.0\]"),
        ({"deadline_seconds": 0}, "deadline_seconds: expected a positive number of seconds, got 0"),
        ({"features": {"other": ["f0"]}}, "table 'other': the plan has no such table"),
        ({"features": {}}, "none of them reads a table"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(OperError, match=text):
        oper.DispatchingLoader([], random_plan(0, TABLES, 1), **settings)


def test_plans_for_inference_or_other_ranks_are_refused() -> None:
    with pytest.raises(OperError, match="expected a plan for training, got one for inference"):
        oper.DispatchingLoader([], random_plan(0, TABLES, 1, mode="inference"))
    with pytest.raises(OperError, match="the plan is for 2 ranks, and the process group has 1"):
        oper.DispatchingLoader([], random_plan(0, TABLES, 2))
