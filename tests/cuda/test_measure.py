"""The links of ranks on devices, measured by the kernels that read their rows."""

from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.measure.link_timer import Amounts, LinkTimer
from oper.measure.measure_ranks import RankMeasurement
from oper.measure.measurement import Measurement
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cpu
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.cuda.device_engines import device_of
from tests.support.runtime import mortal_ranks

AMOUNTS = Amounts(read_bytes=1 << 14, arena_bytes=1 << 14, allreduce_bytes=1 << 12)


def read_each_other(rank: int, group: Any, library: str | None) -> int:
    node, device = Node.join(group, 20.0), device_of(library)
    links = LinkTimer(node, group, partial(dist.barrier, group), 64, AMOUNTS, device)
    slots = torch.randint(links._rows, (links.read_rows,), device=device.torch_device)
    links._heap.rows(0).view(torch.float32).fill_(float(rank))
    device.synchronize()
    dist.barrier(group)
    right = sum(int((links._read(r, slots) == r).all()) for r in node.peers)
    dist.barrier(group)
    return right


def test_ranks_read_rows_of_each_other(library: str | None) -> None:
    assert mortal_ranks.run(3, read_each_other, library) == [3, 3, 3]


def measured(rank: int, group: Any, library: str | None, host: int, cpu: int) -> dict[str, Any]:
    device = Cpu() if rank == cpu else device_of(library)
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=20)
    return asdict(RankMeasurement(store, host * rank, limit, AMOUNTS, 64, device).measure())


def test_devices_make_a_topology(library: str | None, tmp_path: Path) -> None:
    first, second = mortal_ranks.run(2, measured, library, 0, -1)
    assert first == second
    measurement = Measurement(**first | {"latency": Latency(**first["latency"])})
    assert "each on a device of its own" in measurement.to_yaml("here")
    path = tmp_path / "here.yaml"
    path.write_text(measurement.to_yaml("here"))
    topology = Topology.load(str(path))
    assert (topology.ranks, topology.nodes, topology.memory) == (2, 1, ("linked",))
    assert topology.memory_for_plans is not None
    bandwidth = np.array(measurement.bandwidth)
    own, others = np.median(bandwidth.diagonal()), np.median(bandwidth[[0, 1], [1, 0]])
    expected = 1 / np.array([[own, others], [others, own]])
    assert topology.link_cost == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("host", "cpu", "named"),
    [(1, -1, "ranks on devices of 2 hosts"), (0, 1, "rank 1 are on the CPU")],
)
def test_what_cannot_be_measured_is_named(
    library: str | None, host: int, cpu: int, named: str
) -> None:
    for outcome in mortal_ranks.run(2, measured, library, host, cpu):
        assert isinstance(outcome, OperError)
        assert named in str(outcome)
