"""What links are expected to carry, with relays, against rows that are counted in drawn batches."""

import numpy as np
import pytest

from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import costs_under, problems_of_memories
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.links import link_matrix
from oper.topology.topology import Topology
from tests.support.planner.drifting import sources_of

ROWS, SAMPLES, BATCH, DIM, BATCHES = 3_000, 20_000, 2_000, 16, 60


@pytest.mark.parametrize("node_of", [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1), (0, 0, 1, 2, 2)])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_links_carry_what_is_counted(node_of: tuple[int, ...], mode: str) -> None:
    """Batches are drawn from the log. Each rank reads the distinct rows of its part, and a relay
    each distinct row of its node's parts once."""
    random = np.random.default_rng(7)
    share = np.arange(1, ROWS + 1) ** -1.1
    log = random.choice(ROWS, SAMPLES, p=share / share.sum())
    M, nodes = len(node_of), np.array(node_of)
    cost = {"local": 1 / 1e12, "same_node": 1 / 3e11, "other_node": 1 / 2e10}
    topology = Topology("log", node_of, link_matrix(node_of, cost), 2e10, Latency.of_hops(1e-3))
    counts = np.bincount(log, minlength=ROWS).astype(np.uint32)
    profile = Profile((Table("t", ROWS, DIM),), SAMPLES, counts, np.zeros(0, np.uint32), (False,))
    workload = Workload(mode, "distinct", BATCH)  # type: ignore[arg-type]
    plan = make_plan(profile, topology, workload, PlanSettings(0.02))
    # As counted: batches are of the log itself, and not of further samples.
    (cost_of_log,) = costs_under([plan], problems_of_memories(plan, profile, as_counted=True))
    source = sources_of(plan)
    assert (source != source[:, :1]).any() == (mode == "inference")  # the last with copies

    position = np.array([int((nodes[:r] == nodes[r]).sum()) for r in range(M)])
    members = [np.flatnonzero(nodes == node) for node in range(nodes.max() + 1)]
    size = BATCH // M
    passed = np.zeros((M, M))
    for _ in range(BATCHES):
        batch = log[random.permutation(SAMPLES)[: size * M]]
        for node, ranks in enumerate(members):
            asked = []
            for r in ranks:
                rows = np.unique(batch[r * size : (r + 1) * size])
                read_from = source[rows, r]
                far = nodes[read_from] != node
                asked.append(rows[far])
                relay = ranks[position[read_from] % len(ranks)]
                np.add.at(passed[r], np.where(far, relay, read_from), 1)
            rows = np.unique(np.concatenate(asked))
            owner = source[rows, ranks[0]]
            np.add.at(passed, (ranks[position[owner] % len(ranks)], owner), 1)
    counted = passed / BATCHES * 4 * DIM
    np.fill_diagonal(counted, 0.0)
    found = cost_of_log.link_bytes
    assert (counted[found == 0] == 0).all()
    np.testing.assert_allclose(found[found > 0], counted[found > 0], rtol=0.05, atol=4 * DIM)
    away = nodes[:, None] != nodes
    assert found[away].sum() == pytest.approx(counted[away].sum(), rel=0.02)
    sent = cost_of_log.communication_bytes
    assert sent.fetch == pytest.approx(counted.sum(), rel=0.02)
    assert sent.gradient == pytest.approx(sent.fetch if mode == "training" else 0.0)
