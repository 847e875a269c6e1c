"""The hosts of a topology: presets, files, and what a read from the tier costs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.topology.host_tier import host_to_dict, tier_topology
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.topology.test_topology import written

HOSTS = {"host_memory": "128GB", "host_bandwidth": "25GB/s"}


@pytest.mark.parametrize(
    ("spec", "bandwidth", "memory"),
    [
        ("dgx-a100", 25.2e9, 128e9),
        ("dgx-h100", 50.4e9, 256e9),
        ("2x4-a100", 25.2e9, 128e9),
        ("2x4-h100", 50.4e9, 256e9),
        ("dgx-h200", 50.4e9, 256e9),
        ("hgx-b200", 50.4e9, 256e9),
    ],
)
def test_presets_have_hosts(spec: str, bandwidth: float, memory: float) -> None:
    topology = Topology.load(spec)
    assert topology.host_bandwidth == (bandwidth,) * 8
    assert topology.host_memory_bytes == (memory,) * 8


def test_of_cpus_the_host_is_the_ranks_own_memory() -> None:
    topology = Topology.load("cpu:3")
    tier = tier_topology(topology)
    assert np.array_equal(tier.link_cost, topology.link_cost)
    assert tier.capacity is None  # the paper's heap: a plan is not of the machine it was made on
    assert tier.is_one_memory


rates = st.floats(1e6, 1e12)


@given(st.data(), st.integers(1, 5))
def test_a_read_takes_the_slower_of_the_owners_host_link_and_the_ranks_link(data, ranks):
    links = [[1 / data.draw(rates) for _ in range(ranks)] for _ in range(ranks)]
    hosts = tuple(data.draw(rates) for _ in range(ranks))
    memory = tuple(data.draw(st.integers(1, 2**50)) for _ in range(ranks))
    given_ranks = Topology(
        "t",
        (0,) * ranks,
        np.array(links),
        1e9,
        Latency.of_hops(1e-6),
        host_memory_bytes=memory,
        host_bandwidth=hosts,
    )
    tier = tier_topology(given_ranks)
    assert tier.capacity == memory
    for reader in range(ranks):
        for owner in range(ranks):
            slowest = 1 / hosts[owner]
            if reader != owner:
                slowest = max(slowest, links[reader][owner])
            assert tier.link_cost[reader, owner] == slowest


@pytest.mark.parametrize(
    "hosts",
    [
        HOSTS,
        {"host_memory": ["1GB", "2GB"], "host_bandwidth": [1e9, "2GB/s"]},
        {"host_memory": 12345, "host_bandwidth": "3e9"},
    ],
)
def test_files_say_what_the_hosts_have_and_plans_repeat_it(tmp_path: Path, hosts: Any) -> None:
    path = written(tmp_path, node_of=[0, 0], **hosts)
    topology = Topology.load(str(path))
    repeated = Topology.from_dict(topology.to_dict() | host_to_dict(topology))
    assert repeated.host_memory_bytes == topology.host_memory_bytes
    assert repeated.host_bandwidth == topology.host_bandwidth
    assert len(topology.host_bandwidth or ()) == 2
    assert not host_to_dict(topology).keys() & topology.to_dict().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_bandwidth": 0}, r"host_bandwidth: expected a positive number.*got 0"),
        ({"host_bandwidth": -1e9}, r"host_bandwidth.*positive number"),
        ({"host_bandwidth": ["25GB/s"]}, r"host_bandwidth: expected 2 rates.*got 1"),
        ({"host_bandwidth": ["25GB/s", "fast"]}, r"host_bandwidth.*positive number.*fast"),
        ({"host_memory": ["1GB"]}, r"host_memory: expected 2 sizes.*got 1"),
        ({"host_memory": "much"}, r"host_memory.* of rank 0 'much': expected a size"),
        ({"host_memory": 0}, r"host memory of rank 0: expected a positive .*got 0"),
    ],
)
def test_bad_hosts_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    path = written(tmp_path, node_of=[0, 0], **HOSTS | changes)
    with pytest.raises(OperError, match=message) as error:
        Topology.load(str(path))
    assert "t" in str(error.value)


@pytest.mark.parametrize("missing", [("host_memory",), ("host_bandwidth",), tuple(HOSTS)])
def test_a_tier_needs_hosts(tmp_path: Path, missing: tuple[str, ...]) -> None:
    path = written(tmp_path, **{k: v for k, v in HOSTS.items() if k not in missing})
    with pytest.raises(OperError, match="plans with a tier need both; add them") as error:
        tier_topology(Topology.load(str(path)))
    for key in HOSTS:
        assert (f"no {key}" in str(error.value)) == (key in missing)
