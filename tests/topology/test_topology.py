"""Topologies: YAML and its errors, capacities, and what is measured."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oper.base.errors import OperError
from oper.cli import topology as cli
from oper.measure.launch import measure_local
from oper.measure.link_timer import Amounts
from oper.topology.latency import CPU_RANKS, DEVICES, Latency
from oper.topology.topology import Topology

GOOD = {
    "name": "two",
    "node_of": [0, 0, 1, 1],
    "bandwidth": {"local": "1244GB/s", "same_node": "80GB/s", "other_node": "19GB/s"},
    "allreduce_bandwidth": "72GB/s",
}


def written(folder: Path, **changes: object) -> Path:
    """A topology file like GOOD but for `changes`; None leaves a key out."""
    content = {key: value for key, value in (GOOD | changes).items() if value is not None}
    path = folder / "t.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


# homogeneous


def test_homogeneous_needs_equal_links_nodes_and_capacities() -> None:
    base = Topology.load("2x2-a100")
    assert base.with_capacity("64GB").homogeneous
    assert base.with_capacity("1.5").homogeneous
    assert not base.with_capacity("64GB,64GB,64GB,32GB").homogeneous
    content = base.to_dict() | {"node_of": [0, 0, 0, 1]}
    assert not Topology.from_dict(content).homogeneous
    links = base.link_cost.copy()
    links[2, 1] *= 1.01
    assert not Topology.from_dict(base.to_dict() | {"link_cost": links.tolist()}).homogeneous


def test_link_costs_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Topology.load("cpu:2").link_cost[0, 1] = 1.0


# Capacities


def test_the_heap_is_the_papers() -> None:
    topology = Topology.load("cpu:3")
    assert topology.capacities(1000, 0.0, [68, 20]).tolist() == [334 + 88] * 3
    assert topology.capacities(1000, 0.05, [68]).tolist() == [350 + 68] * 3


@given(st.lists(st.sampled_from([4, 68, 260]), min_size=1, max_size=200), st.integers(1, 9))
def test_the_heap_always_holds_one_copy_of_every_row(rows: list[int], ranks: int) -> None:
    limit = Topology.load(f"cpu:{ranks}").capacities(sum(rows), 0.0, sorted(set(rows)))[0]
    held = [0] * ranks
    for row in sorted(rows, reverse=True):
        held[held.index(min(held))] += row
    assert max(held) <= limit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GB", [64 * 10**9] * 3),
        ("1KiB", [1024] * 3),
        ("3", [3000] * 3),
        ("1.5, 1, 0.75", [1500, 1000, 750]),
        ("2000B,0.5,1kB", [2000, 500, 1000]),
    ],
)
def test_capacity_in_bytes_and_factors(text: str, expected: list[int]) -> None:
    topology = Topology.load("cpu:3").with_capacity(text)
    assert topology.capacities(3000, 0.05, [10]).tolist() == expected
    again = Topology.from_dict(json.loads(json.dumps(topology.to_dict())))
    assert again.capacities(3000, 0.05, [10]).tolist() == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "0B", "64 gigs", "1,2", "64000000000"])
def test_capacity_that_says_nothing(text: str) -> None:
    with pytest.raises(OperError, match="capacity"):
        Topology.load("cpu:3").with_capacity(text)


@given(st.integers(1, 300), st.integers(4, 100), st.integers(1, 20))
def test_too_little_capacity_says_how_many_ranks_would_do(
    rows: int, row_bytes: int, ranks: int
) -> None:
    limit = f"{3 * row_bytes + 1}B"  # three rows, and a byte that holds none
    enough = -(-rows // 3)

    def capacities(ranks: int) -> None:
        Topology.load(f"cpu:{ranks}").with_capacity(limit).capacities(
            rows * row_bytes, 0.0, [row_bytes]
        )

    if ranks >= enough:
        capacities(ranks)
        return
    with pytest.raises(OperError) as error:
        capacities(ranks)
    assert f"{(rows - 3 * ranks) * row_bytes:,} too few" in str(error.value)
    assert f"ranks that is enough is {enough}" in str(error.value)


def test_capacity_below_a_row_or_as_a_factor_below_one() -> None:
    topology = Topology.load("cpu:3")
    with pytest.raises(OperError, match=r"row of 68 bytes .* fits on no rank"):
        topology.with_capacity("50B").capacities(6800, 0.0, [68])
    with pytest.raises(OperError, match="more ranks would not help"):
        topology.with_capacity("0.9").capacities(6800, 0.0, [68])


def test_device_memory_warns_and_is_the_default_of_devices_alone() -> None:
    assert Topology.load("dgx-h100").memory_for_plans == (80 * 10**9,) * 8
    host = Topology.load("cpu:2")
    assert host.device_memory_bytes is not None  # of this machine: for warnings
    assert host.memory_for_plans is None
    topology = Topology.load("dgx-a100")
    assert topology.memory_warning([40 * 10**9] * 8) is None
    warning = topology.memory_warning([10**9] * 6 + [50 * 10**9, 41 * 10**9])
    assert warning is not None
    assert "rank 6 needs 50.0 GB for rows" in warning
    by_gets = replace(topology, device_memory_bytes=(60 * 10**9, *[40 * 10**9] * 7))
    assert by_gets.memory_warning([50 * 10**9] + [10**9] * 7) is None
    warning = replace(by_gets, transport="nvshmem").memory_warning([50 * 10**9] + [10**9] * 7)
    assert warning is not None
    assert "rank 1 needs 50.1 GB for rows" in warning  # as rank 0 has
    assert topology.capacities(8 * 10**12, 0.0, [68])[0] > 10**12


# Files


def test_a_file_says_what_a_preset_says(tmp_path: Path) -> None:
    topology = Topology.load(str(written(tmp_path)))
    assert (topology.link_cost == Topology.load("2x2-a100").link_cost).all()
    assert topology.latency == Topology.load("2x2-a100").latency
    assert topology.device_memory_bytes is None


@given(st.lists(st.floats(1e-13, 1e-6), min_size=9, max_size=9), st.booleans())
def test_a_topology_survives_json_to_the_last_bit(costs: list[float], by_kind: bool) -> None:
    links = np.array(costs).reshape(3, 3) if not by_kind else np.full((3, 3), costs[0])
    made = Topology("t", (0, 0, 1), links, 3e9, Latency.of_hops(2e-6), capacity=(5, 0.5, 1.0))
    again = Topology.from_dict(json.loads(json.dumps(made.to_dict())))
    assert (again.link_cost == links).all()
    assert again.capacity == made.capacity
    assert again.to_dict() == made.to_dict()


SQUARE = [[9e9, 1e9, 1e9, 1e9], [1e9, 9e9, 1e9, 1e9], [1e9, 1e9, 9e9, 1e9], [1e9, 1e9, 1e9, 9e9]]


def square(reader: int, source: int, value: object) -> list[list[object]]:
    links: list[list[object]] = [list(row) for row in SQUARE]
    links[reader][source] = value
    return links


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bandwidth": {"local": 1e9, "other_node": 1e9}}, ["bandwidth", "same_node"]),
        ({"bandwidth": {"local": 1e9, "same_node": 0, "other_node": 1}}, ["same_node", "got 0"]),
        ({"bandwidth": GOOD["bandwidth"] | {"nvlink": 1}}, ["bandwidth.nvlink", "unknown"]),  # type: ignore[operator]
        ({"bandwidth": square(2, 1, None)}, ["bandwidth[2][1]", "got nothing"]),
        ({"bandwidth": square(2, 1, -1e9)}, ["bandwidth[2][1]", "got -1000000000.0"]),
        ({"bandwidth": square(0, 3, float("nan"))}, ["bandwidth[0][3]", "got nan"]),
        ({"bandwidth": square(0, 3, "fast")}, ["bandwidth[0][3]", "got 'fast'"]),
        ({"bandwidth": SQUARE[:3]}, ["bandwidth", "expected 4 rows", "got 3"]),
        (
            {"bandwidth": [*SQUARE[:3], SQUARE[3][:2]]},
            ["bandwidth[3]", "expected 4 links", "got 2"],
        ),
        ({"bandwidth": None}, ["either bandwidth or link_cost"]),
        ({"link_cost": SQUARE}, ["either bandwidth or link_cost"]),
        (
            {"link_cost": {"local": 1.0, "same_node": 1e308, "other_node": 1.0}, "bandwidth": None},
            ["link_cost.same_node", "got 1e+308", "1e-18 to 1000"],
        ),
        ({"bandwidth": square(1, 0, 1e19)}, ["bandwidth[1][0]", "got 1e+19", "0.001 to 1e+18"]),
        ({"bandwidth": square(1, 0, 1e-4)}, ["bandwidth[1][0]", "got 0.0001"]),
        ({"allreduce_bandwidth": 1e300}, ["allreduce_bandwidth", "got 1e+300"]),
        ({"latency_seconds": 11}, ["latency_seconds", "got 11", "1e-12 to 10"]),
        ({"device_memory": "9999999TB"}, ["device_memory", "1,152,921,504,606,846,976 bytes"]),
        ({"capacity": "9999999TB"}, ["capacity", "at most"]),
        ({"node_of": [0, 0, 1, "b"]}, ["node_of[3]", "got 'b'"]),
        ({"node_of": 4}, ["node_of", "the node of each"]),
        ({"node_of": None}, ["has no node_of"]),
        ({"allreduce_bandwidth": None}, ["has no allreduce_bandwidth"]),
        ({"allreduce_bandwidth": "72 fast/s"}, ["allreduce_bandwidth", "72 fast"]),
        ({"latency_seconds": -1}, ["latency_seconds", "got -1"]),
        ({"adapters_per_node": 0}, ["adapters_per_node", "1 to 4,096, got 0"]),
        ({"adapters_per_node": "two"}, ["adapters_per_node", "got 'two'"]),
        (
            {"adapters_per_node": 1, "bandwidth": square(1, 0, 1e9)},
            ["adapters_per_node", "every pair's is given", "other_node"],
        ),
        ({"bisection_bandwidth": "wide"}, ["bisection_bandwidth", "'wide'"]),
        ({"bisection_bandwidth": 0}, ["bisection_bandwidth", "got 0", "0.001 to 1e+18"]),
        (
            {"bisection_bandwidth": 1e9, "bandwidth": square(1, 0, 1e9)},
            ["bisection_bandwidth", "every pair's is given", "other_node"],
        ),
        ({"latency_seconds": {"hop": 1e-6}}, ["latency_seconds.hop", "unknown key", "other_node"]),
        ({"latency_seconds": {"kernel": "1s"}}, ["latency_seconds.kernel", "got '1s'"]),
        ({"latency_seconds": {"message": None}}, ["latency_seconds.message", "got nothing"]),
        ({"device_memory": ["1GB", "1GB"]}, ["device_memory", "expected 4 sizes", "got 2"]),
        ({"device_memory": "much"}, ["device_memory", "'much'"]),
        ({"memory": "mapped"}, ["memory", "expected linked or shared, got 'mapped'"]),
        ({"memory": ["shared", 1]}, ["memory[1]", "got 1"]),
        ({"memory": ["shared"]}, ["memory", "expected 2 values, one for each node", "got 1"]),
        ({"transport": "rdma"}, ["transport", "collective, nvshmem, got 'rdma'"]),
        ({"transport": ["peer"]}, ["transport", "got ['peer']"]),
        ({"transport": "peer"}, ["transport", "nvshmem, got peer for ranks of 2 nodes"]),
        (
            {"transport": "collective", "node_of": [0] * 4},
            [
                "transport",
                "for ranks of one node of linked memory",
                "peer (the default) or nvshmem",
            ],
        ),
        (
            {"transport": "peer", "node_of": [0] * 4, "memory": "shared"},
            ["transport", "of shared memory", "expected shared_memory (the default), got peer"],
        ),
        (
            {"transport": "nvshmem", "memory": ["shared", "linked"]},
            ["transport", "nvshmem is for devices", "say memory: linked"],
        ),
        ({"capacity": "1GB,2GB"}, ["capacity", "2 values"]),
        ({"capacity": 40_000_000_000}, ["capacity", "with their unit"]),
        ({"bandwith": 1}, ["bandwith", "is an unknown key"]),
    ],
)
def test_a_bad_file_is_refused_where_it_is_bad(
    tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(OperError) as error:
        Topology.load(str(path))
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_nodes_share_their_adapters(tmp_path: Path) -> None:
    """Three ranks share two adapters; a rank of a node of its own has one."""
    content = {"node_of": [5, 5, 5, 2], "adapters_per_node": 2}
    cost = Topology.load(str(written(tmp_path, **content))).link_cost
    assert 1 / cost[:3, 3] == pytest.approx(19e9 * 2 / 3)
    assert 1 / cost[3, :3] == pytest.approx(19e9)
    assert 1 / cost[0, 1] == pytest.approx(80e9)


@pytest.mark.parametrize(
    ("node_of", "crossing"),
    [
        ([0, 1], 1.0),
        ([0, 0, 1, 1], 2.0),
        # Each of four nodes has two of its three others across.
        ([0, 0, 1, 1, 2, 2, 3, 3], 4 * 2 / 3),
        # Of three nodes two are a half: their ranks have one of two others across, the third both.
        ([7, 4, 2], 1.0),
        # Two ranks have one other across, which has both.
        ([0, 0, 1], 2.0),
    ],
)
def test_halves_of_the_nodes_share_what_joins_them(
    tmp_path: Path, node_of: list[int], crossing: float
) -> None:
    """`crossing`: bytes over it when every rank reads one of other nodes."""
    bandwidth = {"local": "1000GB/s", "same_node": "80GB/s", "other_node": "19GB/s"}
    for shared, each in [(1e9, 1e9 / crossing), (1e12, 19e9)]:
        content = {"node_of": node_of, "bandwidth": bandwidth, "bisection_bandwidth": shared}
        topology = Topology.load(str(written(tmp_path, **content)))
        assert 1 / topology.link_cost[topology.masks()["other_node"]] == pytest.approx(each)
    assert (1 / topology.link_cost[topology.masks()["same_node"]]) == pytest.approx(80e9)


def test_a_node_has_no_bisection(tmp_path: Path) -> None:
    content = {"node_of": [0, 0], "bandwidth": {"local": 2e9, "same_node": 1e9}}
    topology = Topology.load(str(written(tmp_path, bisection_bandwidth=1e9, **content)))
    assert 1 / topology.link_cost[0, 1] == pytest.approx(1e9)


def test_latencies_that_a_file_leaves_out_are_the_usual_ones(tmp_path: Path) -> None:
    def read(**latency: object) -> Latency:
        return Topology.load(str(written(tmp_path, **latency))).latency

    assert read(latency_seconds=3e-6) == Latency(3e-6, 3e-6, 0.0, 0.0)
    assert read(latency_seconds={"other_node": 7e-6}) == replace(DEVICES, other_node=7e-6)
    assert read(latency_seconds={"message": 0}) == replace(DEVICES, message=0.0)
    assert read(latency_seconds={"kernel": 1e-6}, memory="shared") == replace(
        CPU_RANKS, kernel=1e-6
    )
    content = Topology.load("2x2-a100").to_dict()
    assert content["latency_seconds"] == vars(DEVICES)
    assert Topology.from_dict(content).latency == DEVICES
    with pytest.raises(OperError, match=r"latency of kernel: expected 0, or a positive .*got -1.0"):
        Latency(1e-6, 1e-6, kernel=-1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"link_cost": np.full((2, 2), 1e308)},
            "rank 0 reading from rank 0: expected .* 1e-18 to .*got 1e.308",
        ),
        (
            {"link_cost": np.zeros((2, 2))},
            "expected a positive number of seconds per byte, .*got 0.0",
        ),
        ({"allreduce_bandwidth": np.nan}, "the AllReduce: expected .*got nan"),
        ({"latency": 1e-6}, "latency: expected Latency, got float"),
    ],
)
def test_numbers_of_no_machine_are_refused(changes: dict[str, object], words: str) -> None:
    given = {
        "link_cost": np.ones((2, 2)),
        "allreduce_bandwidth": 1e9,
        "latency": Latency.of_hops(0.0),
    }
    made = Topology("t", (0, 0), **given)  # type: ignore[arg-type]
    assert Topology.from_dict(made.to_dict()).latency == Latency.of_hops(0.0)
    with pytest.raises(OperError, match=words):
        Topology("t", (0, 0), **given | changes)  # type: ignore[arg-type]


def test_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("node_of: [0, 0]\nallreduce_bandwidth: 1e9\nbandwidth:\n- [1, 1]\n- [0, 1]\n")
    with pytest.raises(OperError, match=r"line 5: bandwidth\[1\]\[0\]: expected .*, got 0"):
        Topology.load(str(path))
    path.write_text("node_of: [0, 0]\nname: a\nname: b\n")
    with pytest.raises(OperError, match=r"line 3: 'name' is given twice, first on line 2"):
        Topology.load(str(path))
    path.write_text("node_of: [0, 0\nname: a\n")
    with pytest.raises(OperError, match=r"t.yaml, line 2, column 5: is not YAML"):
        Topology.load(str(path))
    path.write_text("")
    with pytest.raises(OperError, match=r"expected a mapping of name, .*, got nothing"):
        Topology.load(str(path))


# The command line


def run(*arguments: str) -> str:
    app = typer.Typer()
    cli.register(app)
    result = CliRunner().invoke(app, ["topology", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("spec", ["cpu:1", "4x4-a100", "dgx-h100"])
def test_show_fits_in_100_columns(spec: str) -> None:
    text = run("show", spec)
    assert spec in text
    assert "AllReduce" in text
    assert max(map(len, text.splitlines())) <= 100


def test_show_json_is_one_object() -> None:
    content = json.loads(run("show", "2x2-a100", "--json"))
    assert (content["ranks"], content["nodes"], content["alike"]) == (4, 2, True)
    assert content["device_memory_bytes"] == [40 * 10**9] * 4


def test_measure_needs_ranks(tmp_path: Path) -> None:
    with pytest.raises(OperError, match="--ranks N"):
        run("measure", "-o", str(tmp_path / "t.yaml"))


def test_measure_needs_whole_values(tmp_path: Path) -> None:
    with pytest.raises(OperError, match="--row-bytes 30: expected a multiple of 4"):
        run("measure", "--ranks", "2", "--row-bytes", "30", "-o", str(tmp_path / "t.yaml"))


# Who serves reads


def test_memory_is_linked_unless_said() -> None:
    topology = Topology.load("2x2-a100")
    assert topology.memory == ("linked", "linked")
    assert "memory" not in topology.to_dict()  # as in topologies and plans that do not know it
    assert not topology.shared_pairs.any()


@pytest.mark.parametrize("memory", ["shared", ["shared", "linked"], ["linked", "shared"], "linked"])
def test_memory_by_node_survives_json(tmp_path: Path, memory: str | list[str]) -> None:
    topology = Topology.load(str(written(tmp_path, memory=memory, node_of=[7, 7, 3, 3])))
    of_node = memory if isinstance(memory, list) else [memory] * 2
    assert list(topology.memory) == of_node  # of nodes in the order of their numbers
    again = Topology.from_dict(json.loads(json.dumps(topology.to_dict())))
    assert again.memory == topology.memory
    expected = np.zeros((4, 4), dtype=bool)
    expected[2, 3] = expected[3, 2] = of_node[0] == "shared"
    expected[0, 1] = expected[1, 0] = of_node[1] == "shared"
    assert (topology.shared_pairs == expected).all()
    assert topology.homogeneous == (of_node[0] == of_node[1])
    assert topology.shares_memory == ("shared" in of_node)
    assert not topology.is_one_memory  # there are two hosts


@pytest.mark.parametrize(
    ("spec", "transport"),
    [("cpu:2", "shared_memory"), ("dgx-h100", "peer"), ("2x2-a100", "collective")],
)
def test_transports_follow_from_the_nodes_and_their_memory(spec: str, transport: str) -> None:
    topology = Topology.load(spec)
    assert topology.known_transport == transport
    assert "transport" not in topology.to_dict()  # as in topologies and plans that do not know it
    with pytest.raises(OperError, match=r"topology .*: transport: expected .* for ranks of"):
        replace(topology, transport="collective" if topology.nodes == 1 else "shared_memory")


@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 0, 0, 0]])
def test_a_transport_survives_json(tmp_path: Path, node_of: list[int]) -> None:
    topology = Topology.load(str(written(tmp_path, transport="nvshmem", node_of=node_of)))
    assert topology.transport == "nvshmem"
    again = Topology.from_dict(json.loads(json.dumps(topology.to_dict())))
    assert again.transport == "nvshmem"


def test_ranks_of_one_host_share_memory() -> None:
    assert Topology.load("cpu:3").shared_pairs.sum() == 6
    assert Topology.load("cpu:3").is_one_memory
    assert not Topology.load("cpu:1").shared_pairs.any()
    assert not Topology.load("cpu:1").is_one_memory
    assert "read each other's rows themselves" in run("show", "cpu:2")
    with pytest.raises(OperError, match="the memory of 2 nodes, and it has 1"):
        Topology(
            "t", (0, 0), np.ones((2, 2)), 1.0, Latency.of_hops(1.0), memory=("shared", "shared")
        )


def test_nvshmem_needs_nodes_of_one_size() -> None:
    topology = Topology.load("2x2-a100")
    uneven = replace(topology, node_of=(0, 0, 0, 1))
    with pytest.raises(OperError, match="its nodes have 1 to 3 ranks, and nvshmem runs where all"):
        replace(uneven, transport="nvshmem")


# Measuring: that it comes to an end and makes a topology, not how fast this machine is

AMOUNTS = Amounts(read_bytes=1 << 20, arena_bytes=1 << 20, allreduce_bytes=1 << 16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_ranks_make_a_topology(tmp_path: Path, ranks: int) -> None:
    measurement = measure_local(ranks, amounts=AMOUNTS, row_bytes=64)
    assert "random rows of 64 bytes" in measurement.to_yaml("here")
    assert np.array(measurement.bandwidth).shape == (ranks, ranks)
    path = tmp_path / "here.yaml"
    path.write_text(measurement.to_yaml("here"))
    topology = Topology.load(str(path))
    assert (topology.ranks, topology.nodes, topology.homogeneous) == (ranks, 1, True)
    assert topology.device_memory_bytes is not None
    assert topology.link_cost == pytest.approx(measurement.topology("here").link_cost, rel=0.01)
    assert topology.memory == ("shared",)
    assert np.ptp(topology.link_cost) == 0  # of a host, own rows or others'
    path.write_text(measurement.to_yaml("here", per_pair=True))
    bandwidth = pytest.approx(np.array(measurement.bandwidth), rel=0.01)
    assert bandwidth == 1 / Topology.load(str(path)).link_cost


@pytest.mark.parametrize(
    ("sent", "named"),
    [(signal.SIGKILL, "rank 1 ended by signal 9"), (signal.SIGSTOP, r"ranks \[1\] did not come")],
)
def test_a_rank_that_does_not_come_is_named(sent: signal.Signals, named: str) -> None:
    before = set(multiprocessing.active_children())  # of other tests

    def strike() -> None:
        while not (found := [c for c in multiprocessing.active_children() if c.name == "rank 1"]):
            time.sleep(0.01)
        os.kill(found[0].pid or 0, sent)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(OperError, match=named):
        measure_local(2, deadline_seconds=2.0, amounts=AMOUNTS)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(OperError, match=r"measuring: device cuda:[01]: there is no CUDA device"):
        measure_local(2, amounts=AMOUNTS, on_devices=True)


def test_more_ranks_than_cores_can_run_are_refused() -> None:
    with pytest.raises(
        OperError, match=r"expected at most .* ranks, 8 for each of .*, got 100,000"
    ):
        measure_local(100_000)


def test_a_rank_ends_with_its_parent_from_its_first_moment() -> None:
    """Before torch is imported, which takes seconds."""
    code = "import sys, oper.measure.local_rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_measure_under_torchrun_on_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(sys.executable).parent
    output = tmp_path / "two.yaml"
    agents = []
    for node in range(2):
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1"
        place = f"--master-addr 127.0.0.1 --master-port {port}"
        started = f"--node-rank {node} --no-python {folder}/oper topology measure -o {output}"
        agents.append(subprocess.Popen(f"{torchrun} {place} {started}".split()))
    assert [agent.wait(timeout=600) for agent in agents] == [0, 0]
    topology = Topology.load(str(output))
    assert topology.node_of == (0, 1)
    assert topology.link_cost[0, 1] > topology.link_cost[0, 0]


def test_a_folder_or_nothing_is_no_topology(tmp_path: Path) -> None:
    for spec in ("", str(tmp_path)):
        with pytest.raises(OperError, match=r"^topology: expected a preset .* or a file, got '"):
            Topology.load(spec)


@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.lists(
            st.one_of(st.integers(1, 10**12), st.floats(0.5, 100.0)), min_size=ranks, max_size=ranks
        )
    )
)
def test_capacities_of_each_rank_are_read_back(capacities):
    """Those of one rank too."""
    made = replace(Topology.load(f"cpu:{len(capacities)}"), capacity=tuple(capacities))
    again = Topology.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.capacity == made.capacity
