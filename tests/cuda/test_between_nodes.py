"""Engines on devices of several nodes: every bit of CPU ranks on the same nodes, of outputs, rows,
optimizer states, gradients of weights and counters. gloo stands for NCCL."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.tables.optimizers import STATES
from tests.cuda.test_training import same_bits, same_training
from tests.runtime.test_node_copies import copying_plan
from tests.support.cuda.device_engines import (
    EmulatedDevice,
    Schedule,
    batch_on,
    device_of,
    serve_on_both,
    start,
    train_on_both,
    train_until_a_death,
)
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan

STEPS: Schedule = ((0,), (1,), (2,))
# Alike; in turns; of unlike sizes; one rank alone; and all alone.
NODES = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 2), (0, 1, 2)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(6) as started:
        yield started


def assert_trains_as_on_the_cpu(
    ranks: Ranks,
    case: Case,
    plan: Plan,
    nodes: tuple[int, ...],
    library: str | None,
    schedule: Schedule = STEPS,
) -> list[dict[str, Any]]:
    given = (case, plan, schedule, library, nodes)
    return same_training(ranks.run(len(nodes), train_on_both, *given))


def plan_of(case: Case, nodes: tuple[int, ...], pooled: float = 0.0, **options: Any) -> Plan:
    tables = tables_of(case)
    given: dict[str, Any] = {"fetch": "distinct", "replicated": 0.3} | options
    plan = random_plan(case.seed, tables, len(nodes), **given)
    names = [table.name for table in tables]
    return replace(plan, pooled_tables=tuple(names[: round(pooled * len(names))]))


CASES = {
    "weights": Case(4, 4, weighted=True),
    "means": Case(5, 4, pooling="mean", optimizer="adam"),
    "unpooled": Case(6, 4, pooling="none"),
    "odd dims": Case(11, 4, dims=(5, 12, 33)),
    "fp16": Case(12, 4, dtype="fp16", optimizer="rowwise_adagrad", rounding=True),
    "unlike optimizers": Case(17, 4, optimizers=("adam", "sgd", "rowwise_adagrad")),
    "frozen tables": Case(18, 4, optimizers=("none", "adagrad")),
}


@pytest.mark.parametrize("name", CASES)
def test_distinct_rows_cross_nodes_once(ranks, library, name):
    case = CASES[name]
    found = assert_trains_as_on_the_cpu(ranks, case, plan_of(case, NODES[0]), NODES[0], library)
    assert sum(sum(of["relayed_rows"]) for of in found) > 0


@pytest.mark.parametrize("nodes", NODES)
def test_any_nodes(ranks, library, nodes):
    case = Case(3, len(nodes), rows=(50, 7, 400, 30), optimizer="momentum_sgd")
    assert_trains_as_on_the_cpu(ranks, case, plan_of(case, nodes), nodes, library)


@pytest.mark.parametrize("fetch", ["pooled", "distinct"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)])
def test_copies_on_each_node(ranks, library, nodes, fetch):
    """Of pooled tables, whose rows alone have such copies in plans, and of others."""
    case = Case(5, len(nodes), optimizer="adagrad", rows=(50, 1, 200, 40), dims=(8, 5))
    plan = copying_plan(case, nodes, float(fetch == "pooled"), fetch=fetch)
    found = assert_trains_as_on_the_cpu(ranks, case, plan, nodes, library)
    assert sum(sum(of["node_copy_rows"]) for of in found) > 0


def test_copies_on_each_node_where_all_ranks_run_on_one(ranks, library):
    case = Case(5, 4, optimizer="adagrad", rows=(50, 1, 200, 40))
    plan = copying_plan(case, NODES[0], fetch="distinct")
    assert_trains_as_on_the_cpu(ranks, case, plan, (0, 0, 0, 0), library)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_of_pooled_tables_are_forwarded(ranks, library, pooling, weighted):
    case = Case(7, 4, pooling=pooling, weighted=weighted, rows=(300, 9, 80, 500))
    plan = plan_of(case, NODES[0], 1.0, fetch="pooled")
    found = assert_trains_as_on_the_cpu(ranks, case, plan, NODES[0], library)
    assert sum(sum(of["forwarded_bags"]) for of in found) > 0


@pytest.mark.parametrize("nodes", NODES)
def test_some_tables_pooled(ranks, library, nodes):
    case = Case(8, len(nodes), pooling="mean", weighted=True, optimizer="adam", rows=(300, 9, 80))
    assert_trains_as_on_the_cpu(ranks, case, plan_of(case, nodes, 0.5), nodes, library)


@pytest.mark.parametrize("number", [2, 4])
def test_distinct_rows_on_one_node(ranks, library, number):
    case = Case(9, number, weighted=True, optimizer="rowwise_adagrad")
    assert_trains_as_on_the_cpu(ranks, case, plan_of(case, (0,) * number), (0,) * number, library)


@pytest.mark.parametrize("pooled", [0.0, 0.5])
def test_accumulated_gradients(ranks, library, pooled):
    """Of rows of other nodes too: far more than there are on this one."""
    case = Case(20, 4, optimizer="adagrad", rows=(400, 300), bags="many")
    plan = plan_of(case, NODES[0], pooled)
    schedule = ((0, 1), (2,), (3, 4, 5), (6,))
    assert_trains_as_on_the_cpu(ranks, case, plan, NODES[0], library, schedule)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2), (0, 0)])
def test_serving(ranks, library, nodes, pooling):
    case = Case(10, len(nodes), pooling=pooling, dtype="int8")
    pooled = 0.5 if pooling != "none" else 0.0
    plan = plan_of(case, nodes, pooled, mode="inference")
    for on_device, on_cpu in ranks.run(len(nodes), serve_on_both, case, plan, library, nodes):
        for part in ("outputs", "tables"):
            same_bits(on_device[part], on_cpu[part])
        assert on_device["counted"] == on_cpu["counted"]


@examples(15)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.sampled_from(NODES),
    replicated=st.sampled_from([0.0, 0.3, 1.0]),
    pooled=st.sampled_from([0.0, 0.5, 1.0]),
    optimizer=st.sampled_from(["none", *STATES]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dims=st.lists(st.sampled_from([1, 4, 8, 33, 128]), min_size=1, max_size=3),
    rows=st.lists(st.sampled_from([1, 7, 300]), min_size=1, max_size=4),
    bags=st.sampled_from(["many", "one", "mean one", "none"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    weighted=st.booleans(),
)
def test_any_module(
    ranks, library, seed, nodes, replicated, pooled, optimizer, pooling, dims, rows, bags, dtype,
    weighted,
):  # fmt: skip
    case = Case(
        seed, len(nodes), optimizer=optimizer, pooling=pooling, dims=tuple(dims), rows=tuple(rows),
        bags=bags, dtype=dtype, weighted=weighted and pooling != "none",
    )  # fmt: skip
    shares = pooled if pooling != "none" else 0.0
    plan = plan_of(case, nodes, shares, replicated=replicated)
    assert_trains_as_on_the_cpu(ranks, case, plan, nodes, library)


def kept_of_bags(rank: int, group: Any, case: Case, plan: Plan, library: str, nodes: Any) -> bool:
    """Whether all that a lookup reads of forwarded bags is kept until it is done."""
    device = device_of(library)
    assert isinstance(device, EmulatedDevice)
    engine = start(case, plan, group, device, nodes=nodes)
    batch = engine.prepare(batch_on(device, case, 0, rank))
    assert batch.forwarded is not None
    assert batch.bags is not None
    device.kept.clear()
    engine.lookup(batch)
    read = [batch.bags, batch.forwarded.weights, batch.forwarded.positions]
    read += [part for sent in batch.forwarded.sent for part in (sent.places, sent.positions)]
    return {part.data_ptr() for part in read if part is not None} <= set(device.kept)


def test_what_is_read_of_forwarded_bags_is_kept(ranks, emulated):
    """They may have been prepared on another stream."""
    case = Case(25, 4, weighted=True, pooling="mean")
    given = (case, plan_of(case, NODES[0], 1.0), str(emulated), NODES[0])
    assert all(ranks.run(4, kept_of_bags, *given))


PHASES = [
    "forward its bags", "asked", "ask for rows", "send rows", "relayed", "add up its bags",
    "send gradients of its bags", "marked", "unite touched replicas", "published",
    "exchange gradients", "sum replicas", "reduced", "applied",
]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "method"),
    [
        *((at, "bitmap") for at in PHASES),
        ("sum replicas", "dense"),
        ("gather replicas' gradients", "allgather"),
    ],
)
def test_a_rank_that_dies_is_named(library, at, method):
    case = Case(22, 4, optimizer="adagrad")
    plan, nodes = plan_of(case, NODES[0], 0.5, method=method), NODES[0]
    given = (case, plan, library, at, nodes)
    outcomes = mortal_ranks.run(4, train_until_a_death, *given, silent=[1])
    for rank in (0, 2, 3):
        assert re.search(r"rank 1 .*(died|disconnected)", str(outcomes[rank])), outcomes[rank]


def look_up_bad_ids(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, nodes: Any
) -> str:
    engine = start(case, plan, group, device_of(library), nodes=nodes)
    batch = batch_on(engine.device, case, 0, rank)
    if rank == 1:
        batch.values()[3] = 10**6
    engine(batch)
    return ""


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_bad_id_is_told_at_once(library, mode):
    case = Case(23, 4)
    plan = plan_of(case, NODES[0], 0.5, mode=mode)
    given = (case, plan, library, NODES[0])
    outcomes = mortal_ranks.run(4, look_up_bad_ids, *given)
    assert re.search("^(?!.*earlier batch).*id 1000000", str(outcomes[1])), outcomes[1]
    for rank in (0, 2, 3):
        assert "rank 1 failed: " in str(outcomes[rank])


def look_up_each_row(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, nodes: Any
) -> str:
    with pytest.raises(OperError) as error:
        start(case, plan, group, device_of(library), nodes=nodes)
    return str(error.value)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_row_for_each_access_is_refused(ranks, library, mode):
    case = Case(24, 4)
    plan = plan_of(case, NODES[0], fetch="raw", mode=mode)
    for error in ranks.run(4, look_up_each_row, case, plan, library, NODES[0]):
        assert "the plan fetches a row for each access, and the ranks are on 2 nodes" in error
        assert "Plan with fetch='distinct'" in error
