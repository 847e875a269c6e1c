"""The replicas' AllReduce of ranks on devices, as processes that share a device's memory: the bits
and the bytes counted of CPU ranks'."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.allreduce import Method, NodeSum, allreduce_cost
from oper.cost.holder_sets import Sums
from oper.plan.plan import Plan
from oper.runtime.allreduce.methods import Replicas, check_numbered
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.rank_accesses import RankAccesses
from oper.runtime.allreduce.replica_allreduce import DEVICE_METHODS
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cpu, Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out, room
from oper.topology.topology import Topology
from tests.support.cuda.device_engines import batch_on, device_of, start
from tests.support.cuda.emulator import Emulator
from tests.support.examples import examples
from tests.support.runtime import engine_cases
from tests.support.runtime.replica_cases import Case, reduce_case
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds

METHODS: tuple[Method, ...] = ("bitmap", "dense", "allgather")


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


def grown(rank: int, group: Any, case: Case, library: str | None, method: str) -> list[int]:
    """Return the bytes that a rank shares after each step."""
    found, of_device = [], DEVICE_METHODS[method]
    before = of_device.write

    def write(self: Any, sums: Any) -> None:
        before(self, sums)
        found.append(self.shared_bytes)

    with patch.object(of_device, "write", write):
        reduce_case(rank, group, case, method, [0] * case.ranks, device_of(library))
    return found


@pytest.mark.parametrize("method", ["bitmap", "allgather"])
def test_buffers_grow_with_what_may_be_touched(
    ranks: Worlds, library: str | None, method: str
) -> None:
    """Of 30,000 replicas, 7.7 MB of gradients, a step touches 1 %, then all, and then some."""
    case = Case(1, 2, ((30_000, 64),), (0.01, 1.0, 0.3), spread=True)
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, case, method)
    for first, second, third in ranks.run(2, grown, case, library, method):
        assert first < 30_000 * 4 * 64 < second == third < 3 * 30_000 * 4 * 64


def test_dense_buffers_hold_all_replicas_from_the_first_step_on(
    ranks: Worlds, library: str | None
) -> None:
    case = Case(1, 2, ((30_000, 64),), (0.01, 1.0, 0.3), spread=True)
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, case, "dense")
    for taken in ranks.run(2, grown, case, library, "dense"):
        assert len({*taken}) == 1
        assert 30_000 * 4 * 64 <= taken[0] < 30_000 * 4 * 64 + (2 << 20)


def test_messages_of_other_nodes_grow_where_they_are_held(
    ranks: Worlds, library: str | None
) -> None:
    """Rank 0 holds its own message and the messages of the two ranks of the other node, which are
    longer than any before in the second step."""
    case = Case(4, 3, ((30_000, 64),), (0.01, 1.0, 0.02, 1.0), spread=True)
    given = (case, "allgather", (0, 1, 1), "at_once")
    assert_bits_and_bytes_of_cpu_ranks(ranks, library, *given)


def sums_of(case: Case, step: int) -> Sums:
    """Return what the planner expects if it knows the rows that ranks touch in a step."""
    given = [case.slots_and_grads(step, rank) for rank in range(case.ranks)]
    rows, row_bytes, union_bytes, gather_bytes = 0, 0, 0, 0.0
    for b, (count, dim) in enumerate(case.buckets):
        of_ranks = [of_rank[b][0] for of_rank in given]
        rows, row_bytes = rows + count, row_bytes + 4 * dim * count
        union_bytes += 4 * dim * len(np.unique(np.concatenate(of_ranks)))
        gather_bytes += (4 * dim + 4) * float(np.mean([len(slots) for slots in of_ranks]))
    return replace(
        Sums.zeros(1),
        rows=np.array(rows),
        row_bytes=np.array(row_bytes),
        union_bytes=np.array(union_bytes),
        gather_bytes=np.array(gather_bytes),
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [2, 3, 4])
def test_ranks_count_the_bytes_that_the_plan_prices(
    ranks: Worlds, library: str | None, number: int, method: Method
) -> None:
    """Replicas are multiples of 64, because bitmaps are words."""
    case = Case(3, number, ((6400, 16), (640, 48)), (0.05, 1.0, 0.4), spread=True)
    topology = Topology.load(f"1x{number}-h100")
    found = ranks.run(number, reduce_on_both, case, library, method)
    counted = np.array([of_device for (_, of_device), _ in found])
    for step in range(len(case.touched)):
        cost = allreduce_cost(topology, method)
        seconds = cost.row_seconds(sums_of(case, step)).item()
        priced = number * seconds * topology.allreduce_bandwidth
        assert counted[:, step, 0].sum() == pytest.approx(priced, rel=1e-12)
        assert not counted[:, step, 1].any()


# Kernels of a device and operators of a CPU rank.
STARTED: dict[Method, tuple[int, int]] = {
    "bitmap": (13, 5),
    "dense": (14, 5),
    "allgather": (14, 3),
}
# Operators of torch that start no kernel on a device.
NO_KERNEL = {
    "aten::alias",
    "aten::as_strided",
    "aten::detach",
    "aten::empty",
    "aten::empty_strided",
    "aten::select",
    "aten::slice",
    "aten::to",
    "aten::view",
}
# Prices count them as hops.
SIGNALS = {"oper::post_signal", "oper::stream_is_done", "oper::wait_signals"}


def started(
    rank: int, group: Any, case: engine_cases.Case, plan: Plan, emulated: str
) -> tuple[int, int]:
    """Return the number of kernels that an emulated device starts in the third step, and the number
    of operators that a CPU rank calls in it."""
    found = []
    for device in (device_of(emulated), Cpu()):
        engine, emulator = start(case, plan, group, device), Emulator(Path(emulated))
        for step in range(3):
            launches = emulator.launches()
            with torch.autograd.profiler.profile() as profiled:
                out = engine(batch_on(device, case, step, rank))
                out.backward(engine_cases.gradient_of(case, step, rank, out))
        engine.close()
        events = profiled.function_events
        if device.kind == "cpu":
            operators = (each.name for each in events if each.name.startswith("oper::"))
            found.append(sum(name not in SIGNALS for name in operators))
        else:
            leaves = (each.name for each in events if not each.cpu_children)
            of_torch = sum(n.startswith("aten::") and n not in NO_KERNEL for n in leaves)
            found.append(emulator.launches() - launches + of_torch)
    on_device, on_cpu = found
    return on_device, on_cpu


def test_replicas_start_few_kernels_and_operators(ranks: Worlds, emulated: Path) -> None:
    """A step with replicas starts so many more than a step without; docs/design/sparse-allreduce.md
    states them."""
    case = engine_cases.Case(21, 2, optimizer="adagrad", dims=(16,), rows=(300, 900))

    def of_plan(replicated: float, method: str) -> list[tuple[int, int]]:
        tables = engine_cases.tables_of(case)
        plan = random_plan(21, tables, 2, replicated=replicated, method=method)
        found: list[tuple[int, int]] = ranks.run(2, started, case, plan, str(emulated))
        return found

    without = of_plan(0.0, "bitmap")
    for method in METHODS:
        with_replicas = of_plan(0.5, method)
        more = {(a - c, b - d) for (a, b), (c, d) in zip(with_replicas, without, strict=True)}
        assert more == {STARTED[method]}, method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dims", [(33, 33), (1, 1, 1), (5, 64, 5), (4,)])
def test_buffers_have_room_between_buckets(
    library: str | None, method: Method, dims: tuple[int, ...]
) -> None:
    """A batch touches one replica of each bucket by as many accesses."""
    device, node, codes = device_of(library), Node.join(None), 2
    assert isinstance(device, Cuda)
    count, groups = len(dims), [codes * b for b in range(len(dims))]
    none = [torch.empty(0, dtype=torch.int64)] * count
    given = Replicas(none, [100] * count, list(dims), groups, "at_once")
    replicas = DEVICE_METHODS[method](node, Proxies(node, device), device, given)
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
    units = 2 if method == "bitmap" else 1  # of memory that devices share: bitmaps, gradients
    assert replicas.shared_bytes == units * (2 << 20)
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


def test_a_captured_step_refuses_more_accesses_than_it_has_room_for(library: str | None) -> None:
    device, replicas = device_of(library), 1_000
    assert isinstance(device, Cuda)
    accesses = RankAccesses(Node.join(None), device, replicas)
    accesses.say(80)
    assert accesses.of_node() == 80
    accesses.say(60)
    capture, most = device.captured(accesses.of_node)
    assert most == 100  # a quarter more than the most so far
    capture.run()
    for number in (100, 10):
        accesses.say(number)
        capture.run()
    accesses.say(101)
    with pytest.raises(OperError, match=r"batches of up to 100 accesses .*, got 101: give"):
        capture.run()
    few = RankAccesses(Node.join(None), device, 90)
    capture, most = device.captured(lambda: few.of_node(room=95))
    few.say(10_000)  # of 90 replicas no more than these are touched
    capture.run()
    assert most == 95


def test_replicas_that_messages_cannot_number() -> None:
    check_numbered([3, 1 << 31])
    with pytest.raises(OperError, match=r"expected up to 2,147,483,648 replicas .* got 4,294"):
        check_numbered([3, 1 << 32])
