"""The replicas' AllReduce of ranks on devices, as processes that share a device's memory: the bits
and the bytes counted of CPU ranks'."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.allreduce import NodeSum
from oper.runtime.allreduce.device_bitmap import DeviceBitmap
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out, room
from tests.support.cuda.device_engines import device_of
from tests.support.examples import examples
from tests.support.runtime.replica_cases import Case, reduce_case
from tests.support.runtime.worlds import Worlds


METHODS = ("bitmap", "dense", "allgather")


def reduce_on_both(
    rank: int,
    group: Any,
    case: Case,
    library: str | None,
    method: str,
    nodes: tuple[int, ...] = (),
    node_sum: NodeSum = "at_once",
) -> list[Any]:
    of_ranks = list(nodes) or [0] * case.ranks
    return [
        reduce_case(rank, group, case, method, of_ranks, device, node_sum)
        for device in (device_of(library), None)
    ]


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 4),
    buckets=st.lists(
        st.tuples(st.sampled_from([0, 1, 65, 300]), st.sampled_from([1, 5, 20, 33, 64])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    touched=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=3).map(tuple),
    spread=st.booleans(),
)


def assert_bits_and_bytes_of_cpu_ranks(
    ranks: Worlds, library: str | None, case: Case, method: str, *on_nodes: Any
) -> None:
    for (found, counted), (expected, counted_there) in ranks.run(
        case.ranks, reduce_on_both, case, library, method, *on_nodes
    ):
        assert counted == counted_there
        for step, step_there in zip(found, expected, strict=True):
            for bucket, bucket_there in zip(step, step_there, strict=True):
                for part, part_there in zip(bucket, bucket_there, strict=True):
                    assert part.tobytes() == part_there.tobytes()


@pytest.mark.parametrize("method", METHODS)
@examples(25)
@given(cases)
def test_bits_and_bytes_of_cpu_ranks(
    ranks: Worlds, library: str | None, method: str, case: Case
) -> None:
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, case, method)


def grown(rank: int, group: Any, case: Case, library: str | None) -> list[int]:
    """The bytes that a rank shares after each step."""
    replicas, found = DeviceBitmap.write, []

    def write(self: DeviceBitmap, sums: Any) -> None:
        replicas(self, sums)
        found.append(self.shared_bytes)

    with patch.object(DeviceBitmap, "write", write):
        reduce_case(rank, group, case, "bitmap", [0] * case.ranks, device_of(library))
    return found


def test_buffers_grow_with_what_may_be_touched(ranks: Worlds, library: str | None) -> None:
    """Of 30,000 replicas, 7.7 MB of gradients, a step touches 1 %, then all, and then some."""
    case = Case(1, 2, ((30_000, 64),), (0.01, 1.0, 0.3), spread=True)
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, case)
    for first, second, third in ranks.run(2, grown, case, library):
        assert first < 30_000 * 4 * 64 < second == third < 3 * 30_000 * 4 * 64


@pytest.mark.parametrize("dims", [(33, 33), (1, 1, 1), (5, 64, 5), (4,)])
def test_buffers_have_room_between_buckets(library: str | None, dims: tuple[int, ...]) -> None:
    """A batch touches one replica of each bucket by as many accesses."""
    device, node, codes = device_of(library), Node.join(None), 2
    assert isinstance(device, Cuda)
    count, groups = len(dims), [codes * b for b in range(len(dims))]
    none = [torch.empty(0, dtype=torch.int64)] * count
    given = Replicas(none, [100] * count, list(dims), groups, "at_once")
    replicas = DeviceBitmap(node, Proxies(node, device), device, given)
    slots, ends = torch.arange(count), [n for b in range(count) for n in (b + 1, b + 1)]
    before = torch.tensor([0, *ends]).to(device.torch_device)
    rows = SortedRows(slots.to(device.torch_device), before, 1)
    laid = laid_out(before, dims, device)
    values = torch.full((room(rows.slots, laid, dims, device),), 2.0).to(device.torch_device)
    replicas.mark(rows)
    replicas.write(RowGradients(rows.slots, laid, values))
    replicas.reduce()
    found = replicas.read()
    assert int(found.groups[1, -1]) <= len(found.values)
    assert replicas.shared_bytes == 2 * (2 << 20)  # of bitmaps and of gradients, a unit each
    for b, dim in enumerate(dims):
        assert found.gradients_of(range(b, b + 1), dim).tolist() == [[2.0] * dim]


@pytest.mark.parametrize("method", METHODS)
@examples(25)
@given(
    cases,
    st.sampled_from([(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1), (0, 1, 1, 2)]),
    st.sampled_from(["at_once", "in_rounds"]),
)
def test_bits_and_bytes_of_cpu_ranks_on_several_nodes(
    ranks: Worlds,
    library: str | None,
    method: str,
    case: Case,
    nodes: tuple[int, ...],
    node_sum: NodeSum,
) -> None:
    case = replace(case, ranks=len(nodes))
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, case, method, nodes, node_sum)
