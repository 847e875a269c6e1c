"""Baselines against row-by-row references, and what every baseline must keep."""

from dataclasses import replace
from itertools import pairwise
from queue import Queue
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.cost.expected_reads import expected_reads, node_touches
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.workload import Workload
from oper.planner.baselines import oper_atc24_paper as p
from oper.planner.baselines import simple as b
from oper.planner.baselines import torchrec_planner as trec
from oper.planner.baselines.baseline import (
    BatchReading,
    Cells,
    NoPlacementError,
    PaperNotes,
    PooledBytes,
    Status,
    TorchRecNotes,
    price_baseline,
)
from oper.planner.class_placement.partitions import partitions
from oper.planner.predict_step import predict_step
from oper.planner.price_fetched import predict_fetched
from oper.planner.problem.problem import Problem
from oper.profiling.profile import Profile
from oper.topology.latency import Latency
from oper.topology.relays import relayed_sizes
from oper.topology.topology import Topology
from tests.support.planner.profiles import make_profile, profile_problem


def sums_by_row(problem: Problem, profile: Profile, owner: np.ndarray) -> Sums:
    """Sums of single-owner groups, row by row from the profile's own arrays."""
    mode, ranks = problem.workload.mode, problem.topology.ranks
    repeat = [table.rows for table in profile.tables]
    m = np.repeat([float(table.memory_bytes(mode)) for table in profile.tables], repeat)
    S = np.repeat([float(table.row_bytes) for table in profile.tables], repeat)
    accesses = profile.accesses.astype(np.int64)
    samples_with_row = accesses.copy()
    for t, has in enumerate(profile.bagged):
        if has:
            first = profile.samples_with_row_offsets[t]
            part = profile.samples_with_row[first : first + profile.tables[t].rows]
            samples_with_row[profile.offsets[t] : profile.offsets[t + 1]] = part
    R, D, U = expected_reads(accesses, samples_with_row, profile.samples, problem.workload, ranks)
    sizes = relayed_sizes(problem.topology)
    of_nodes = node_touches(samples_with_row, profile.samples, problem.workload, ranks, sizes)
    values = [np.ones(len(S)), m, S, accesses, R, S * R, S * D, S * U, (S + 4) * D]
    values += [of_nodes, S[:, None] * of_nodes, *np.zeros((3, len(S)))]  # none pooled
    sums = [np.zeros((ranks, *value.shape[1:])) for value in values]
    for total, value in zip(sums, values, strict=True):
        np.add.at(total, owner, value)
    return Sums(*sums)


def assert_same_sums(found: Sums, wanted: Sums) -> None:
    for name, value in vars(wanted).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, atol=1e-9, err_msg=name)


@given(
    classes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
)
def test_rows_go_to_the_least_loaded_one_by_one(classes: list[tuple[int, int]], ranks: int) -> None:
    accesses, rows = np.array(sorted(classes, reverse=True), dtype=np.int64).T
    class_of, rank_of, given_rows = native.ops().rows_to_least_loaded(
        torch.from_numpy(rows.copy()), torch.from_numpy(accesses.copy()), ranks
    )
    found = np.zeros((len(rows), ranks), dtype=np.int64)
    np.add.at(found, (class_of.numpy(), rank_of.numpy()), given_rows.numpy())
    load = [0] * ranks
    for c, (n, size) in enumerate(zip(rows.tolist(), accesses.tolist(), strict=True)):
        expected = [0] * ranks
        for k in range(n):
            rank = load.index(min(load)) if size else (c + k) % ranks
            expected[rank] += 1
            load[rank] += size
        assert found[c].tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_access_greedy_is_row_by_row(seed: int) -> None:
    profile = make_profile(seed)
    problem = profile_problem(profile)
    found = b.access_greedy(problem)
    load = [0] * problem.topology.ranks
    for accesses in sorted(profile.accesses.tolist(), reverse=True):
        load[load.index(min(load))] += accesses
    np.testing.assert_array_equal(found.sums.accesses, load)


def test_access_greedy_spreads_rows_without_accesses() -> None:
    profile = make_profile(0, rows=(1000,), bags=False)
    profile.accesses[10:] = 0
    found = b.access_greedy(profile_problem(profile))
    assert found.sums.rows.min() > 240
    assert found.sums.rows.sum() == 1000


@given(seed=st.integers(0, 999), rows=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_contiguous_baselines_are_row_by_row(seed: int, rows: list[int]) -> None:
    profile = make_profile(seed, tuple(rows))
    problem = profile_problem(profile, mode="training")
    for method in (b.memory_greedy, b.row_wise, b.table_wise):
        found = method(problem)
        assert found.pieces is not None
        owner = found.pieces.owners()
        assert len(owner) == sum(rows)
        assert_same_sums(found.sums, sums_by_row(problem, profile, owner))


@given(seed=st.integers(0, 999), rows=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_even_baselines_keep_the_capacity_without_extra_memory(seed: int, rows: list[int]) -> None:
    profile = make_profile(seed, tuple(rows))
    problem = profile_problem(profile, mode="training", extra=0.0)
    for method in (b.memory_greedy, b.row_wise):
        found = method(problem)
        assert price_baseline(problem, found).feasible, found.name


def test_longer_ranges_of_row_wise_go_to_the_ranks_in_turn() -> None:
    profile = make_profile(0, rows=(5, 4, 5, 4, 6))  # every second one of another width
    found = b.row_wise(profile_problem(profile))
    assert found.sums.rows.tolist() == [6] * 4


def test_table_wise_gives_equally_many_whole_tables() -> None:
    profile = make_profile(0, rows=(5, 9, 2, 7, 4, 4, 1, 3))
    found = b.table_wise(profile_problem(profile))
    assert found.pieces is not None
    assert found.pieces.rank.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_memory_greedy_runs_are_in_order() -> None:
    profile = make_profile(0, rows=(100, 30, 17))
    found = b.memory_greedy(profile_problem(profile))
    assert found.pieces is not None
    assert (np.diff(found.pieces.owners().astype(int)) >= 0).all()
    spread = found.sums.memory_bytes.max() - found.sums.memory_bytes.min()
    assert spread <= max(table.memory_bytes("inference") for table in profile.tables)


def algorithm_1(
    problem: Problem, size: np.ndarray, traffic: np.ndarray, owner: np.ndarray
) -> np.ndarray:
    """Algorithm 1 as a plain double loop, partitions hottest per byte first."""
    ranks, L = problem.topology.ranks, problem.topology.link_cost
    path = np.repeat(owner[:, None], ranks, axis=1)
    free = problem.capacity_bytes - np.bincount(owner, size, minlength=ranks)
    budget = problem.budget_bytes
    active = list(range(ranks))
    while active:
        for g in list(active):
            CL = [traffic[path[:, g] == j].sum() * L[g, j] for j in range(ranks)]
            CL[g] = -1.0
            t = int(np.argmax(CL))
            fits = (path[:, g] == t) & (size <= min(free[g], budget))
            candidates = [n for n in np.argsort(-(traffic / size), kind="stable") if fits[n]]
            if not candidates:
                active.remove(g)
                continue
            n = candidates[0]
            path[n, g] = g
            free[g] -= size[n]
            budget -= size[n]
            for i in range(ranks):
                if i != g and path[n, i] != i and L[i, g] < L[i, path[n, i]]:
                    path[n, i] = g
    return path


@given(
    seed=st.integers(0, 9999),
    node_of=st.sampled_from([(0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1, 1), (0, 0, 0)]),
    local=st.sampled_from([2.0**-40, 2.0**-37]),  # cheaper than a node-mate's rows, or dearer
    extra=st.sampled_from([0.0, 0.1, 0.7, 3.0]),
)
def test_replicate_inference_is_algorithm_1(
    seed: int, node_of: tuple[int, ...], local: float, extra: float
) -> None:
    random = np.random.default_rng(seed)
    ranks = len(node_of)
    # Powers of two keep the running sums of link costs exact, so that ties are the same ties.
    link = np.where(np.equal.outer(node_of, node_of), 2.0**-38, 2.0**-35)
    np.fill_diagonal(link, local)
    topology = Topology("drawn", node_of, link, 72e9, Latency.of_hops(2e-6))
    problem = replace(profile_problem(make_profile(seed)), topology=topology)
    size = 2 ** random.integers(3, 10, 20)
    traffic = (2 ** random.integers(0, 20, 20)).astype(np.float64)
    owner = random.integers(0, ranks, 20)
    capacity = np.bincount(owner, size, minlength=ranks) + extra * size.sum() / ranks
    problem = replace(problem, capacity_bytes=capacity, budget_bytes=extra * size.sum())
    found = p.replicate_inference(problem, size, traffic, owner)
    np.testing.assert_array_equal(found, algorithm_1(problem, size, traffic, owner))


@given(
    seed=st.integers(0, 999),
    mode=st.sampled_from(["training", "inference"]),
    topology=st.sampled_from(["2x2-a100", "cpu:1", "dgx-a100"]),
    extra=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_paper_places_every_row_and_keeps_the_budget(
    seed: int, mode: Literal["training", "inference"], topology: str, extra: float
) -> None:
    profile = make_profile(seed)
    problem = profile_problem(profile, topology, mode, extra)
    found = p.paper(problem)
    assert found.cells is not None
    classes, sets = problem.classes, found.holder_sets
    placed = found.cells.dense(len(classes), len(sets))
    np.testing.assert_array_equal(placed.sum(axis=1), classes.rows)
    assert_same_sums(found.sums, classes.sums(placed))
    assert_readable(sets)
    if mode == "training":
        assert set(sets.copies) <= {1, problem.topology.ranks}
    cost = price_baseline(problem, found)
    assert cost.extra_bytes <= problem.budget_bytes * (1 + 1e-12)


def assert_readable(sets: HolderSets) -> None:
    """Every path ends at a holder, and every holder reads its own copy."""
    reader = np.arange(sets.source.shape[1])
    assert np.take_along_axis(sets.holds, sets.source.astype(int), axis=1).all()
    assert (sets.source[sets.holds] == np.broadcast_to(reader, sets.source.shape)[sets.holds]).all()


def test_backtracking_keeps_the_best_round() -> None:
    profile = make_profile(3, rows=(3000, 500), bags=False)
    problem = profile_problem(profile, threshold=0.2)
    first = p.place(problem, partitions(problem.classes, 0.2))
    best = p.backtrack(problem)
    assert best.balance > first.balance
    assert best.partitions.threshold < 0.2


@pytest.mark.parametrize(("batch", "samples"), [("rank", 16), ("all ranks", 64)])
def test_training_replicates_by_the_printed_rule(batch: BatchReading, samples: int) -> None:
    profile = make_profile(1, bags=False)
    problem = profile_problem(profile, mode="training", extra=10.0, threshold=0.001)
    parts = p.backtrack(problem).partitions
    owner = np.zeros(len(parts), dtype=np.int64)
    roomy = replace(problem, capacity_bytes=np.full(4, 1e9))
    path = p.replicate_training(roomy, parts, owner, batch)
    rows = p.partition_totals(parts, np.ones(len(problem.classes)))
    away = problem.topology.link_cost[~np.eye(4, dtype=bool)]
    bandwidth = 1 / away.mean()
    limit = bandwidth / (samples * problem.topology.allreduce_bandwidth)
    replicated = (path == np.arange(4)).all(axis=1)
    np.testing.assert_array_equal(replicated, parts.accesses / rows / 1000 > limit)
    assert replicated.any()
    assert not replicated.all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topology", ["2x2-a100", "1x4-a100", "cpu:4"])
def test_the_paper_is_compared_with_its_better_reading(topology: str, seed: int) -> None:
    problem = profile_problem(make_profile(seed), topology, mode="training", extra=1.0)
    found = p.paper(problem)
    assert isinstance(found.notes, PaperNotes)
    placed = p.backtrack(problem)
    seconds = {}
    for batch in p.BATCHES:
        source = p.replicate_training(problem, placed.partitions, placed.owner, batch)
        seconds[batch] = price_baseline(
            problem, p._baseline(problem, placed, source, batch)
        ).objective_seconds
    assert price_baseline(problem, found).objective_seconds == min(seconds.values())
    assert found.notes.batch is not None
    assert seconds[found.notes.batch] == min(seconds.values())


def torchrec_answer() -> list[dict[str, object]]:
    """Table 0 column-wise on ranks 0 and 3, 1 data-parallel, 2 table-wise, 3 row-wise."""
    shards: list[dict[str, object]] = [
        {
            "table": "t0",
            "sharding": "column_wise",
            "rank": rank,
            "offsets": [0, at],
            "sizes": [40, 8],
        }
        for rank, at in ((0, 0), (3, 8))
    ]
    shards += [
        {"table": "t1", "sharding": "data_parallel", "rank": r, "offsets": None, "sizes": None}
        for r in range(4)
    ]
    shards.append(
        {"table": "t2", "sharding": "table_wise", "rank": 2, "offsets": [0, 0], "sizes": [1, 16]}
    )
    shards += [
        {"table": "t3", "sharding": "row_wise", "rank": r, "offsets": [7 * r, 0], "sizes": [n, 8]}
        for r, n in enumerate((7, 7, 7, 4))
    ]
    return shards


def test_torchrec_shards_become_groups() -> None:
    profile = make_profile(5)
    problem = profile_problem(profile, mode="training")
    shards = trec.read_shards(torchrec_answer(), profile)
    rows = trec.whole_row_sums(problem, trec.count_shards(problem, shards))
    found = trec.group_sums(problem, shards, rows)
    # Each rank's rows; the columns of table 0 are counted apart below.
    owner = np.repeat([0, 4, 2, 0], [40, 3, 1, 25])
    owner[44:] = np.repeat([0, 1, 2, 3], [7, 7, 7, 4])
    five = replace(
        problem, topology=Topology.load("cpu:5"), workload=Workload("training", "raw", 80)
    )
    wanted = sums_by_row(five, profile, owner)
    table_0 = np.where(np.arange(69) < 40, 0, 1)
    whole = sums_by_row(five, profile, table_0)
    for name in ("read_bytes", "gradient_bytes", "row_bytes"):
        half = getattr(whole, name)[0] / 2
        moved = getattr(wanted, name) + half * np.array([-1, 0, 0, 1, 0])
        np.testing.assert_allclose(getattr(found, name), moved, err_msg=name)
    # Both column shards look up every access; each keeps 4 bytes of row-wise state a row.
    np.testing.assert_allclose(found.read_rows[3], wanted.read_rows[3] + whole.read_rows[0])
    state = wanted.memory_bytes[0] - 40 * (16 * 4 + 4) + 40 * (8 * 4 + 4)
    assert found.memory_bytes[0] == state


def test_whole_row_shards_have_the_step_of_their_rows() -> None:
    """Shards of whole rows are cells, and a table cut into columns keeps its bytes."""
    profile = make_profile(5)
    problem = profile_problem(profile, "2x2-a100", mode="training")
    shards = [
        trec.Shard(t, "row_wise", rank, first, last, table.dim)
        for t, table in enumerate(profile.tables)
        for rank, (first, last) in enumerate(
            pairwise(
                int(profile.offsets[t]) + table.rows * part // problem.ranks
                for part in range(problem.ranks + 1)
            )
        )
    ]
    notes = TorchRecNotes(1.0, 0.0, 0.0, {}, PooledBytes(0.0, 0.0, 0.0, 0.0))
    baseline = trec.shards_baseline(problem, shards, trec.count_shards(problem, shards), notes)
    _, found = predict_fetched(problem, baseline)
    assert baseline.column_cells is not None
    cells, sets = baseline.column_cells.cells, len(baseline.holder_sets)
    counts = cells.dense(len(problem.classes), sets)
    wanted = predict_step(problem, baseline.holder_sets, counts, "none")
    for one, other in zip(found.phases, wanted.phases, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12), one.name
    assert int(counts.sum()) == sum(table.rows for table in profile.tables)

    halves = [
        replace(shard, columns=shard.columns // 2, first_column=first)
        for shard in shards
        for first in (0, shard.columns // 2)
    ]
    split = trec.column_cells(problem, halves, trec.count_shards(problem, halves))
    row_bytes = problem.classes.S

    def bytes_of(cells: Cells, share: Floats | float) -> Floats:
        of_cell = cells.rows * row_bytes[cells.class_of] * share
        return np.bincount(cells.group, of_cell, minlength=sets).astype(np.float64)

    np.testing.assert_allclose(bytes_of(split.cells, split.share), bytes_of(cells, 1.0))
    assert split.cells.rows.sum() == 2 * cells.rows.sum()


def test_torchrec_pooled_bytes_follow_the_formulas() -> None:
    profile = make_profile(5)
    problem = profile_problem(profile, mode="training")
    shards = trec.read_shards(torchrec_answer(), profile)
    hits = trec.whole_row_sums(problem, trec.count_shards(problem, shards)).accesses
    found = trec.pooled_bytes(problem, shards, hits)
    lookups = problem.accesses_of_tables / 1000
    batch, readers = 16, 3
    ids = readers * batch * (2 * (8 * lookups[0] + 8) + 8 * lookups[2] + 8)
    ids += readers * batch * (8 * lookups[3] + 4 * 8)
    assert found.ids == pytest.approx(ids)
    assert found.outputs == readers * batch * 4 * (2 * 8 + 16 + 4 * 8)
    assert found.gradients == found.outputs
    assert found.allreduce == 4 * 2 * 3 / 4 * 3 * 8 * 4


def test_torchrec_plans_from_end_to_end() -> None:
    pytest.importorskip("torchrec")
    profile = make_profile(2, rows=(4000, 300, 50, 20), bags=False)
    problem = profile_problem(profile, mode="training")
    found = trec.torchrec(problem, limit_seconds=120)
    assert found.sums.rows.sum() == pytest.approx(4370)
    assert isinstance(found.notes, TorchRecNotes)
    assert found.notes.capacity_factor >= 1
    assert sum(found.notes.tables.values()) == 4
    # A process that imports torchrec and ends takes seconds, and they are no planning.
    assert found.planning_seconds == found.notes.plan_seconds


def lines(*written: str | None) -> "Queue[str | None]":
    """What a process has written so far; None: it has ended."""
    queue: Queue[str | None] = Queue()
    for line in written:
        queue.put(line)
    return queue


def test_the_last_plan_within_the_limit_is_torchrecs() -> None:
    """Each is for less memory than the one before, so that the search may be cut short."""
    assert trec._last_answer(lines(trec.READY, None), 9.0) is None
    assert trec._last_answer(lines(None), 9.0) is None
    assert trec._last_answer(lines(trec.READY, '{"a": 1}', '{"a": 2}', None), 9.0) == {"a": 2}
    assert trec._last_answer(lines(trec.READY, '{"a": 1}'), 0.0) == {"a": 1}
    with pytest.raises(NoPlacementError, match="more than 0 s"):
        trec._last_answer(lines(trec.READY), 0.0)


def test_a_torchrec_that_never_starts_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trec, "_START_SECONDS", 0.001)
    with pytest.raises(NoPlacementError, match=r"did not start within 0\.001 s") as late:
        trec.torchrec(profile_problem(make_profile(2)), limit_seconds=60.0)
    assert late.value.status == Status.TIME_LIMIT


def test_a_torchrec_that_cannot_start_says_why() -> None:
    pytest.importorskip("torchrec")
    question = {"no": "tables"}
    with pytest.raises(OperError, match="TorchRec's planner failed: KeyError: 'tables'"):
        trec.ask(question, 60.0)
