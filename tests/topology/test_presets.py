"""Topologies by name: what the presets say, and the nearest name of one that is none."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.topology.latency import CPU_RANKS, DEVICES
from oper.topology.presets import PRESETS, nearest_preset
from oper.topology.topology import Topology


@pytest.mark.parametrize(
    ("spec", "ranks", "nodes", "link", "allreduce"),
    [
        ("dgx-a100", 8, 1, 240e9, 235e9),
        ("dgx-h100", 8, 1, 370e9, 480e9),
        ("dgx-h200", 8, 1, 370e9, 480e9),
        ("hgx-b200", 8, 1, 720e9, 830e9),
        ("2x4-a100", 8, 2, 80e9, 72e9),
        ("4x8-h100", 32, 4, 370e9, 304e9),
        ("2x4-h100", 8, 2, 370e9, 152e9),
        ("3x1-h100", 3, 3, 38e9, 38e9),
        ("1x4-h100", 4, 1, 370e9, 370e9),
        ("4x4-a100", 16, 4, 80e9, 72e9),
        ("3x5-a100", 15, 3, 80e9, 72e9),
        ("cpu:6", 6, 1, 6e9, 2.5e9),
    ],
)
def test_presets(spec: str, ranks: int, nodes: int, link: float, allreduce: float) -> None:
    topology = Topology.load(spec)
    assert (topology.ranks, topology.nodes, topology.homogeneous) == (ranks, nodes, True)
    assert topology.link_cost[0, 1] == pytest.approx(1 / link)
    assert topology.allreduce_bandwidth == allreduce
    assert topology.latency == (CPU_RANKS if spec.startswith("cpu") else DEVICES)


@pytest.mark.parametrize(
    ("spec", "share", "allreduce"),
    [
        ("2x8-h100", 1.0, 304e9),
        ("2x8-h100:8", 1.0, 304e9),
        ("2x8-h100:2", 0.25, 76e9),
        ("2x8-h100:1", 0.125, 38e9),
        ("2x8-a100", 0.5, 72e9),
        ("2x2-a100", 1.0, 36e9),
        ("2x4-a100:1", 0.25, 18e9),
    ],
)
def test_devices_of_a_node_share_its_network_adapters(
    spec: str, share: float, allreduce: float
) -> None:
    """In links and in the AllReduce alike."""
    topology = Topology.load(spec)
    other = topology.masks()["other_node"]
    line = 38e9 if "h100" in spec else 19e9
    assert 1 / topology.link_cost[other] == pytest.approx(share * line)
    assert topology.allreduce_bandwidth == allreduce
    assert topology.homogeneous
    near = topology.masks()["same_node"]
    alone = Topology.load(spec.partition(":")[0])
    assert (topology.link_cost[near] == alone.link_cost[near]).all()


@pytest.mark.parametrize("spec", ["2x8-h100:0", "2x8-h100:9"])
def test_a_node_has_no_more_adapters_than_devices(spec: str) -> None:
    with pytest.raises(
        OperError, match="expected 1 to 8 network adapters in a node of 8 devices, got"
    ):
        Topology.load(spec)


def test_links_across_nodes_have_the_papers_ratio() -> None:
    cost = Topology.load("2x4-a100").link_cost
    assert cost[0, 4] / cost[0, 3] == pytest.approx(4.21, abs=0.005)
    assert (cost == cost.T).all()
    assert cost[3, 4] == cost[0, 7]
    assert (np.diag(cost) < cost[0, 1]).all()


@pytest.mark.parametrize(
    ("spec", "memory", "local"),
    [
        ("dgx-a100", 40, 1_244e9),
        ("dgx-h100", 80, 2_680e9),
        ("dgx-h200", 141, 3_840e9),
        ("hgx-b200", 180, 6_400e9),
        ("2x8-h100", 80, 2_680e9),
    ],
)
def test_device_memory_of_presets(spec: str, memory: int, local: float) -> None:
    topology = Topology.load(spec)
    assert topology.memory_for_plans == (memory * 10**9,) * topology.ranks
    assert topology.link_cost[0, 0] == pytest.approx(1 / local)


def test_one_node_of_eight_is_the_server() -> None:
    one, server = Topology.load("1x8-h100"), Topology.load("dgx-h100")
    assert one.to_dict() | {"name": "dgx-h100"} == server.to_dict()
    assert one.host_bandwidth == server.host_bandwidth


def test_other_nodes_have_the_same_share_of_the_line() -> None:
    a100, h100 = Topology.load("2x4-a100"), Topology.load("2x4-h100")
    assert 25e9 * a100.link_cost[0, 4] == pytest.approx(50e9 * h100.link_cost[0, 4])


@pytest.mark.parametrize("spec", ["2x9-h100", "1x16-h100"])
def test_a_switch_joins_eight(spec: str) -> None:
    with pytest.raises(OperError, match=r"at most 8; say more nodes, as [24]x8-h100"):
        Topology.load(spec)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h100", "dgx-h100"),
        ("a100", "dgx-a100"),
        ("hgx-h200", "dgx-h200"),
        ("dgx-b200", "hgx-b200"),
        ("B200", "hgx-b200"),
        ("dgx_a100", "dgx-a100"),
        ("dgx-a101", "dgx-a100"),
        ("4x8h100", "4x8-h100"),
        ("2x4-b200", "hgx-b200"),
        ("cpu", "cpu:N"),
        ("h100x8", "dgx-h100"),
        ("8xh100", "dgx-h100"),
        ("8xH100", "dgx-h100"),
        ("h100:8", "dgx-h100"),
        ("1x8h100", "dgx-h100"),
        ("a100x4", "1x4-a100"),
        ("h100x16", "2x8-h100"),
        ("64xa100", "8x8-a100"),
        ("2x8xh100", "2x8-h100"),
        ("h100-2x4", "2x4-h100"),
        ("dgx-h100x2", "2x8-h100"),
        ("h100-80gb", "dgx-h100"),
        ("4xh100-80GB", "1x4-h100"),
        ("13xh100", "dgx-h100"),
        ("99999xh100", "dgx-h100"),
        ("h200x8", "dgx-h200"),
        ("0xa100", "dgx-a100"),
        ("cpu4", "cpu:4"),
        ("4cpus", "cpu:4"),
        ("cpu:0", "cpu:N"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    assert nearest_preset(typed) == meant
    if typed != "cpu:0":  # which is a preset of no ranks
        with pytest.raises(OperError, match=f"did you mean {meant}"):
            Topology.load(typed)


@given(
    st.lists(
        st.sampled_from(["h100", "a100", "b200", "h200", "x", "-", "cpu", "dgx", "gb", " "])
        | st.integers(0, 2000).map(str),
        max_size=6,
    ).map("".join)
)
def test_what_is_suggested_exists_and_is_no_larger_than_what_was_typed(typed: str) -> None:
    meant = nearest_preset(typed)
    if meant is None or meant in PRESETS:
        return
    ranks = Topology.load(meant).ranks
    numbers = [int(number) for number in re.findall("[0-9]+", typed)]
    assert ranks <= max(8, *numbers) * max(8, *numbers)


def test_a_name_near_none_is_answered_with_all() -> None:
    with pytest.raises(OperError, match=r"expected a preset \(dgx-a100, .*NxG-h100.*, got 'zebra'"):
        Topology.load("zebra")


@pytest.mark.parametrize("spec", ["dgx-b200", "cpu:0", "cpu:1000000", "0x4-a100", "no/such.yaml"])
def test_unknown_topologies_are_refused(spec: str) -> None:
    with pytest.raises(OperError, match=spec):
        Topology.load(spec)
