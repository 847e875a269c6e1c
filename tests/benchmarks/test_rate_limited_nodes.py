"""Steps over a limited cable: what plans are made for, what ranks read, and that it is limited."""

from pathlib import Path

import numpy as np
import pytest

import oper
from tests.support.runtime import two_hosts
from tests.support.simulator import random_log

pytest.importorskip("torchrec")  # whose batches the ranks train

from benchmarks.runtime import rate_limited_nodes, step_over_a_cable

MEASURED = oper.Topology.load("cpu:4")


def test_a_topology_has_the_cables_rate() -> None:
    """What passes it is shared by two ranks. A sum of x bytes of every rank has a node send x."""
    payload = 1e6
    cable = rate_limited_nodes.Cable(1e-3, payload)
    topology = rate_limited_nodes.topology_of(10e6, cable, MEASURED)
    assert topology.node_of == (0, 0, 1, 1)
    assert topology.link_cost[0, 2] == pytest.approx(2 / payload)
    assert topology.link_cost[0, 1] == MEASURED.link_cost[0, 1]
    moved = 1e6
    assert 2 * 3 / 4 * moved / topology.allreduce_bandwidth == pytest.approx(moved / payload)
    assert topology.shares_memory
    machine = rate_limited_nodes.machine_of(cable, MEASURED)
    assert machine.adapter_bandwidth == pytest.approx(payload)


def test_ranks_read_their_samples(tmp_path: Path) -> None:
    """In each batch each rank has other samples, whose bags are those of the log."""
    log = random_log(np.random.default_rng(0), [1000, 50], 64)
    tables = [oper.Table(f"t{n}", rows, 4) for n, rows in enumerate((1000, 50))]
    path = tmp_path / "batches.npz"
    rate_limited_nodes.write_batches(path, log, tables, batch=16)
    everything: list[list[int]] = []
    steps = rate_limited_nodes.BLOCKS * rate_limited_nodes.STEPS
    for rank in range(4):
        batches = step_over_a_cable.read_batches(rank, tables, path)
        assert len(batches) == steps
        assert batches[0].keys() == [table.columns[0] for table in tables]
        everything += [ids.tolist() for ids in batches[0][tables[0].columns[0]].to_dense()]
    expected = [log.bags(0, np.array([sample]))[0].tolist() for sample in range(64)]
    assert sorted(everything) == sorted(expected)


def test_a_cable_is_measured() -> None:
    if reason := two_hosts.missing():
        pytest.skip(reason)
    cable = rate_limited_nodes.Cable.measured((2, 2), 1_000_000_000)
    assert cable.hop > 0
    assert 0 < cable.bytes_a_second < 1.05 * 1e9 / 8


def test_both_ends_of_the_cable_are_limited() -> None:
    if reason := two_hosts.missing():
        pytest.skip(reason)
    for host, found in enumerate(two_hosts.run((1, 1), two_hosts.limits, bits_a_second=10_000_000)):
        (queue,) = found
        assert queue["dev"] == f"host{host}"
        assert queue["options"]["rate"] == 10_000_000 // 8
