"""What the simulator counts of a batch, against counting access by access; and its phases."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.simulator.bound import least_training_seconds
from benchmarks.planning.simulator.iteration import phases_of, simulate
from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.phases import Phase
from benchmarks.planning.simulator.placement import Fetch, Placement
from benchmarks.planning.simulator.traffic import Traffic, count
from tests.support.simulator import (
    DIM,
    PLAIN,
    ROW_BYTES,
    STATE_BYTES,
    machines,
    random_log,
    random_placement,
)

VECTOR = 4 * DIM
MAIL = VECTOR + 8
ROWS = [7, 3]
BATCH = 3
seeds = st.integers(0, 2**32 - 1)
TRAVELS = [Fetch.RAW, Fetch.DISTINCT]


def drawn(seed: int, machine: Machine, fetch: Fetch) -> tuple[Placement, Log, np.ndarray]:
    random = np.random.default_rng(seed)
    log = random_log(random, ROWS, 12)
    samples = random.integers(0, 12, (machine.ranks, BATCH))
    placement = random_placement(random, machine.ranks, ROWS, fetch)
    if fetch in (Fetch.POOLED_BY_RANK, Fetch.POOLED_BY_RANK_AND_NODE):
        for part in placement.parts:  # of which no row is on several ranks
            part.holder_set[part.holder_set == machine.ranks] = 0
    return placement, log, samples


def accesses(log: Log, samples: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(rank, table, bag, row) of each access."""
    return [
        (rank, t, bag, int(row))
        for rank, of_rank in enumerate(samples)
        for t in range(len(ROWS))
        for bag, sample in enumerate(of_rank)
        for row in log.values[t][log.offsets[t][sample] : log.offsets[t][sample + 1]]
    ]


def owner_of(placement: Placement, table: int, row: int) -> int | None:
    """The rank that alone holds a row; None of one that all hold."""
    (owners,) = np.nonzero(placement.holds[placement.parts[table].holder_set[row]])
    return int(owners[0]) if len(owners) == 1 else None


@given(seeds, machines(), st.sampled_from(TRAVELS), st.booleans())
def test_rows_that_travel(seed: int, machine: Machine, fetch: Fetch, relays: bool) -> None:
    placement, log, samples = drawn(seed, machine, fetch)
    placement = replace(placement, relays=relays)
    relays &= fetch is Fetch.DISTINCT and machine.ranks_per_node > 1
    found = count(placement, log, samples, machine, training=True)
    M, node = machine.ranks, machine.node_of
    expected = Traffic(M)
    read = [(i, t, row) for i, t, _, row in accesses(log, samples)]
    for i, t, row in read if fetch is Fetch.RAW else set(read):
        j = owner_of(placement, t, row)
        if j is None or j == i:
            continue
        if node[i] == node[j]:
            (expected.pool_moved if fetch is Fetch.RAW else expected.copies)[j, i] += ROW_BYTES
        elif relays:
            relay = machine.proxy(j, int(node[i]))
            if relay != i:
                expected.wanted[i, relay] += 8
                expected.copies[relay, i] += ROW_BYTES
                expected.node_sums_moved[i, relay] += MAIL
        else:
            expected.ids[i, j] += 8
            expected.answers[j, i] += ROW_BYTES
            expected.serve_memory[j] += 2 * ROW_BYTES
    for i, t, row in set(read):
        j = owner_of(placement, t, row)
        expected.sum_memory[i] += VECTOR
        if j is not None:
            near = node[i] == node[j] and i != j
            expected.merge_moved[i, j] += MAIL * near
            if not (relays and node[i] != node[j]):
                expected.gradients[i, j] += MAIL * (node[i] != node[j])
                expected.merge_memory[j] += MAIL * (not near)
        by_pointer = fetch is Fetch.RAW and j is not None and j != i and node[i] == node[j]
        expected.pool_memory[i] += 0 if by_pointer else ROW_BYTES
    for i, t, row in read:
        j = owner_of(placement, t, row)
        by_pointer = fetch is Fetch.RAW and j is not None and j != i and node[i] == node[j]
        expected.pool_cache[i] += 0 if by_pointer else ROW_BYTES
        expected.sum_cache[i] += VECTOR
    for t, row in {(t, row) for _, t, row in read}:
        if (j := owner_of(placement, t, row)) is not None:
            expected.merge_memory[j] += 2 * (ROW_BYTES + STATE_BYTES)
    for n, t, row in {(node[i], t, row) for i, t, row in read} if relays else ():
        j = owner_of(placement, t, row)
        if j is not None and node[j] != n:
            relay = machine.proxy(j, int(n))
            expected.ids[relay, j] += 8
            expected.answers[j, relay] += ROW_BYTES
            expected.serve_memory[j] += 2 * ROW_BYTES
            expected.node_sums_memory[relay] += VECTOR
            expected.gradients[relay, j] += MAIL
            expected.merge_memory[j] += MAIL
    expected.pool_memory += len(ROWS) * BATCH * VECTOR
    expected.sum_memory += len(ROWS) * BATCH * VECTOR
    check(found, expected)
    check_replicas(found, placement, read)


@given(seeds, machines())
def test_pooled_by_node(seed: int, machine: Machine) -> None:
    placement, log, samples = drawn(seed, machine, Fetch.POOLED_BY_NODE)
    found = count(placement, log, samples, machine, training=True)
    node = machine.node_of
    expected = Traffic(machine.ranks)
    bags: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    mailed: set[tuple[int, int, int, int]] = set()
    reads: set[tuple[int, int, int, int]] = set()
    every = accesses(log, samples)
    for i, t, bag, row in every:
        j = owner_of(placement, t, row)
        at = i if j is None or node[j] == node[i] else machine.proxy(i, int(node[j]))
        expected.sum_cache[at] += VECTOR
        if j is not None:
            mailed.add((at, j, t, row))
        if at != i:
            expected.ids[i, at] += 4
            bags[i, at].add((t, bag))
        if j is None or j == at:
            expected.serve_cache[at] += ROW_BYTES
            reads.add((i, at, t, row))
        else:
            expected.serve_moved[j, at] += ROW_BYTES
    touched_bags: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for (i, proxy), of_pair in bags.items():
        vectors = VECTOR * len(of_pair)
        expected.ids[i, proxy] += 4 * len(of_pair)
        expected.answers[proxy, i] += vectors
        expected.vectors[i, proxy] += vectors
        expected.serve_memory[proxy] += vectors
        expected.sum_memory[proxy] += vectors
        expected.pool_memory[i] += vectors
        touched_bags[i] |= of_pair
    for i, of_rank in touched_bags.items():
        expected.pool_memory[i] += 2 * VECTOR * len(of_rank)
    for _, at, _, _ in reads:
        expected.serve_memory[at] += ROW_BYTES
    for at, j, _, _ in mailed:
        near = node[at] == node[j] and at != j
        expected.merge_moved[at, j] += MAIL * near
        expected.merge_memory[j] += MAIL * (not near)
        expected.sum_memory[at] += VECTOR
    read = [(i, t, row) for i, t, _, row in every]
    for i, t, row in set(read):
        expected.sum_memory[i] += VECTOR * (owner_of(placement, t, row) is None)
    for t, row in {(t, row) for _, t, row in read}:
        if (j := owner_of(placement, t, row)) is not None:
            expected.merge_memory[j] += 2 * (ROW_BYTES + STATE_BYTES)
    expected.serve_memory += len(ROWS) * BATCH * VECTOR
    expected.sum_memory += len(ROWS) * BATCH * VECTOR
    check(found, expected)
    check_replicas(found, placement, read)


@given(seeds, machines(), st.booleans())
def test_pooled_by_rank(seed: int, machine: Machine, by_node: bool) -> None:
    """Every owner of a table sends a vector for each bag, or every node of owners."""
    fetch = Fetch.POOLED_BY_RANK_AND_NODE if by_node else Fetch.POOLED_BY_RANK
    placement, log, samples = drawn(seed, machine, fetch)
    found = count(placement, log, samples, machine, training=True)
    node, output = machine.node_of, BATCH * VECTOR
    answers, ids, add = np.zeros((3, machine.ranks, machine.ranks))
    for i, t, _, row in accesses(log, samples):
        ids[i, owner_of(placement, t, row)] += 8
    for i in range(machine.ranks):
        for t, rows in enumerate(ROWS):
            owners = {owner_of(placement, t, row) for row in range(rows)}
            senders = {machine.proxy(i, int(node[j])) for j in owners} if by_node else owners
            for j in owners:
                ids[i, j] += 4 * BATCH
                add[j, machine.proxy(i, int(node[j]))] += output * by_node
            for j in senders:
                answers[j, i] += output
    np.testing.assert_array_equal(found.answers, answers)
    np.testing.assert_array_equal(found.vectors, answers.T)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.add_moved, add)
    np.testing.assert_array_equal(found.spread, add.T)
    for nothing in (found.gradients, found.merge_moved, found.copies):
        assert not nothing.any()


def check(found: Traffic, expected: Traffic) -> None:
    """Every array is equal."""
    for name, array in vars(expected).items():
        if isinstance(array, np.ndarray):
            np.testing.assert_array_equal(getattr(found, name), array, err_msg=name)


def check_replicas(found: Traffic, placement: Placement, read: list[tuple[int, int, int]]) -> None:
    """The replicas that each rank touched, and those that any did."""
    there = sum(
        owner_of(placement, t, row) is None for t, rows in enumerate(ROWS) for row in range(rows)
    )
    touched = {(i, t, row) for i, t, row in read if owner_of(placement, t, row) is None}
    if not there:
        assert not found.replicas
        return
    (replicas,) = found.replicas
    assert replicas.rows == there
    assert replicas.union == len({(t, row) for _, t, row in touched})
    by_rank = np.bincount([i for i, _, _ in touched], minlength=found.ranks)
    np.testing.assert_array_equal(replicas.touched, by_rank)


@given(seeds, machines(), st.sampled_from(list(Fetch)), st.booleans())
def test_permuted_ranks(seed: int, machine: Machine, fetch: Fetch, training: bool) -> None:
    """Ranks that are alike may have each other's rows and samples: a step takes as long."""
    placement, log, samples = drawn(seed, machine, fetch)
    random = np.random.default_rng(seed)
    places = random.permutation(machine.nodes)[:, None] * machine.ranks_per_node
    if machine.adapters_per_node in (1, machine.ranks_per_node):
        places = places + random.permutation(machine.ranks_per_node)
    else:  # which share an adapter depends on their positions
        places = places + np.arange(machine.ranks_per_node)
    at = places.ravel()  # rank r becomes rank at[r]
    back = np.argsort(at)
    moved = Placement(
        at[placement.source[:, back]], placement.holds[:, back], placement.parts, "bitmap"
    )
    before = steps(placement, log, samples, machine, training)
    after = steps(moved, log, samples[back], machine, training)
    assert [p.name for p in before] == [p.name for p in after]
    for one, other in zip(before, after, strict=True):
        assert one.on(machine) == pytest.approx(other.on(machine)), one.name


def steps(
    placement: Placement, log: Log, samples: np.ndarray, machine: Machine, training: bool
) -> list[Phase]:
    traffic = count(placement, log, samples, machine, training)
    return phases_of(traffic, machine, "bitmap", training)


@given(seeds, machines(), st.sampled_from(TRAVELS))
def test_no_step_is_below_the_bound(seed: int, machine: Machine, fetch: Fetch) -> None:
    placement, log, samples = drawn(seed, machine, fetch)
    bound = least_training_seconds(list(placement.parts), log, samples, machine)
    taken = sum(p.on(machine).least for p in steps(placement, log, samples, machine, True))
    assert bound <= taken


def test_a_step_by_hand() -> None:
    """Two nodes of one rank. Each reads two samples of one id: rank 0 rows 0 and 0, rank 1 rows 0
    and 1; both rows are on rank 0. Rank 1 asks for two rows of 8 bytes and gets them by adapters of
    10 bytes/s, and sends two gradients of 8 + 8 bytes."""
    machine = replace(PLAIN, ranks_per_node=1, adapters_per_node=1, far_hop=1.0, message=0.5)
    log = Log([np.array([0, 0, 0, 1])], [np.arange(5)])
    placement = random_placement(np.random.default_rng(0), 2, [2], Fetch.DISTINCT)
    placement.parts[0].holder_set[:] = 0
    phases = {p.name: p for p in steps(placement, log, np.array([[0, 1], [2, 3]]), machine, True)}
    found = {name: phase.on(machine) for name, phase in phases.items()}
    assert found["ids"].seconds == pytest.approx(2 * 1.5 + 16 / 10)
    assert found["serve"].seconds == pytest.approx(32 / 1000)
    assert found["answers"].seconds == pytest.approx(1.5 + 16 / 10)
    # Rank 1 reads two rows and writes two vectors, of 8 bytes each.
    assert found["pool"].seconds == pytest.approx(32 / 1000)
    assert found["sum"].seconds == pytest.approx(32 / 1000)
    assert found["gradients"].seconds == pytest.approx(2 * 1.5 + 32 / 10)
    # Rank 0 reads its own gradient and the two that came, and reads and writes two rows of 12.
    assert found["merge"].seconds == pytest.approx((16 + 32 + 2 * 24) / 1000)
    assert found["copies"].seconds == found["sums"].seconds == 0


def test_batches_are_drawn_without_repeats() -> None:
    log = Log([np.arange(12)], [np.arange(13)])
    once = log.draw(3, 4, np.random.default_rng(1))
    assert once.shape == (3, 4)
    assert sorted(once.ravel()) == list(range(12))
    often = log.draw(500, 4, np.random.default_rng(1)).ravel()  # more than it has
    counts = np.bincount(often, minlength=12)
    assert 2000 / 12 * 0.7 < counts.min() < counts.max() < 2000 / 12 * 1.3


def test_bags_of_samples() -> None:
    log = Log([np.array([4, 5, 6, 7])], [np.array([0, 1, 1, 4])])
    ids, bag = log.bags(0, np.array([2, 1, 0, 2]))
    assert ids.tolist() == [5, 6, 7, 4, 5, 6, 7]
    assert bag.tolist() == [0, 0, 0, 2, 3, 3, 3]


def test_an_iteration_is_the_mean_of_its_batches() -> None:
    placement, log, _ = drawn(3, PLAIN, Fetch.DISTINCT)
    (one,) = simulate(placement, log, [PLAIN], "training", 8, batches=1)
    two, alike = simulate(placement, log, [PLAIN, PLAIN], "training", 8, batches=2)
    assert two == alike
    assert one.phases.keys() == two.phases.keys()
    assert two.least <= two.seconds * (1 + 1e-9)
