"""Engines on devices of two nodes, by a fake NVSHMEM: inference and training equal those of CPU
ranks of two nodes in every bit, and a rank that is gone is named within the deadline."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.tables.optimizers import STATES
from tests.support.cuda import nvshmem_engines
from tests.support.cuda.device_engines import served_cases
from tests.support.cuda.nvshmem_engines import plan_of, serve_on_both
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case
from tests.support.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Processes that start NVSHMEM once."""
    with Ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


CASES = [
    Case(1, 2),
    Case(4, 2, weighted=True),
    Case(5, 2, pooling="mean", dtype="fp16"),
    Case(6, 2, pooling="none", bags="one"),
    Case(11, 2, dims=(5, 33), dtype="bf16"),
    Case(14, 2, dtype="int8", int32=True),
    Case(9, 2, bags="none"),
]


WAITS = "A kernel here waits for rows or gradients that do not come any more"


def assert_equal(ranks: Ranks, cases: list[tuple[Case, Any]], *libraries: Path) -> list[Any]:
    found = ranks.run(ranks.most, serve_on_both, cases, *map(str, libraries))
    for of_rank in found:
        for (_, plan), (on_device, on_cpu) in zip(cases, of_rank, strict=True):
            for name in ("outputs", "tables"):
                for mine, expected in zip(on_device[name], on_cpu[name], strict=True):
                    assert torch.equal(mine.view(torch.int32), expected.view(torch.int32))
            assert on_device["left"] == 0
            counted, expected = on_device["counted"], on_cpu["counted"]
            if plan.workload.known_fetch == "raw":  # whose rows a device does not sort
                counted["distinct_rows"] = expected["distinct_rows"]
            for name in [name for name in expected if name.startswith("relayed")]:
                del counted[name], expected[name]  # kernels ask owners themselves
            assert counted == expected
    return found


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_two_ranks_serve_as_on_the_cpu(
    two: Ranks, emulated: Path, emulated_nvshmem: Path, fetch: str
) -> None:
    cases = [(case, plan_of(case, fetch=fetch)) for case in CASES]
    found = assert_equal(two, cases, emulated, emulated_nvshmem)
    for of_rank in found:
        for on_device, _ in of_rank:
            if fetch == "raw":  # each access of a row of the other node
                assert on_device["gets"] == on_device["elsewhere"]
            else:
                assert on_device["gets"] <= on_device["elsewhere"]
    assert sum(on_device["gets"] for on_device, _ in found[0]) > 100


@given(
    case=served_cases(ranks=[4], dims=[4, 5, 8, 64], bags=["one", "many", "mean one", "none"]),
    fetch=st.sampled_from(["raw", "distinct"]),
)
@examples(6)
def test_four_ranks_serve_as_on_the_cpu(
    four: Ranks, emulated: Path, emulated_nvshmem: Path, case: Case, fetch: str
) -> None:
    assert_equal(four, [(case, plan_of(case, fetch=fetch))], emulated, emulated_nvshmem)


def test_tables_on_one_node_are_read_by_pointer(
    four: Ranks, emulated: Path, emulated_nvshmem: Path
) -> None:
    """All of a plan's rows are on node 0, whose ranks ask nobody."""
    case = Case(3, 4)
    plan = plan_of(case, idle=(2, 3), replicated=0.0)
    found = assert_equal(four, [(case, plan)], emulated, emulated_nvshmem)
    gets = [of_rank[0][0]["gets"] for of_rank in found]
    assert gets[:2] == [0, 0]
    assert min(gets[2:]) > 0


def test_several_engines(two: Ranks, emulated: Path, emulated_nvshmem: Path) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case), str(emulated), str(emulated_nvshmem))
    assert two.run(2, nvshmem_engines.two_engines, *given) == [[True] * 3] * 2


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_ids_out_of_range_are_told_with_a_later_batch(
    emulated: Path, emulated_nvshmem: Path, fetch: str
) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case, fetch=fetch), str(emulated), str(emulated_nvshmem))
    (same, said), (same_there, _) = mortal_ranks.run(2, nvshmem_engines.bad_ids, *given)
    assert same
    assert same_there
    assert "in an earlier batch: feature" in said
    assert "id 1000000" in said


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_ends_those_that_wait_for_its_rows(
    emulated: Path, emulated_nvshmem: Path, tmp_path: Path, ranks: int
) -> None:
    case = Case(1, ranks)
    given = (case, plan_of(case), str(emulated), str(emulated_nvshmem), str(tmp_path / "said"))
    found = mortal_ranks.run(ranks, nvshmem_engines.serve_until_a_death, *given)
    dead, said = f"rank {ranks - 1}", "gave no sign of life for 3 s" if ranks == 2 else "died"
    for rank in range(ranks - 1):
        text = (tmp_path / f"said{rank}").read_text() if found[rank] is None else str(found[rank])
        assert f"{dead} {said}" in text
    # Those of the other node wait in a kernel, which nothing ends but their process.
    assert found[0] is None
    assert WAITS in text or ranks == 4


def test_a_rank_that_dies_before_others_have_its_gradients(
    emulated: Path, emulated_nvshmem: Path, tmp_path: Path
) -> None:
    case = Case(22, 2, optimizer="adagrad")
    plan = plan_of(case, mode="training", fetch="distinct")
    given = (case, plan, str(emulated), str(emulated_nvshmem), str(tmp_path / "said"))
    function = nvshmem_engines.die_before_gradients_are_brought
    assert mortal_ranks.run(2, function, *given) == [None, None]
    text = (tmp_path / "said0").read_text()
    assert "rank 1 gave no sign of life for 3 s" in text
    assert WAITS in text


def test_where_there_is_no_room_for_gradients_smaller_batches_are_advised(
    emulated: Path, emulated_nvshmem: Path
) -> None:
    case = Case(22, 2, optimizer="adagrad")
    plan = plan_of(case, mode="training", fetch="distinct")
    given = (case, plan, str(emulated), str(emulated_nvshmem))
    for outcome in mortal_ranks.run(2, nvshmem_engines.train_without_room, *given):
        assert "bytes of NVSHMEM's memory on" in str(outcome)
        assert "make batches smaller, plan with a larger `reserve`" in str(outcome)


def test_lookups_after_a_death_raise(emulated: Path, emulated_nvshmem: Path) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case), str(emulated), str(emulated_nvshmem))
    found = mortal_ranks.run(2, nvshmem_engines.wait_for_a_death, *given)
    assert "rank 1 gave no sign of life for 3 s" in str(found[0])


def assert_trains_as_on_the_cpu(
    ranks: Ranks, cases: list[tuple[Case, Plan]], emulated: Path, emulated_nvshmem: Path
) -> None:
    given = (cases, str(emulated), str(emulated_nvshmem))
    for found in ranks.run(cases[0][0].ranks, nvshmem_engines.train_on_both, *given):
        for on_device, on_cpu in found:
            for part in ("outputs", "weight_grads", "tables"):
                for mine, other in zip(on_device[part], on_cpu[part], strict=True):
                    assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
            assert on_device["left"] == 0
            for name in ("updated_rows", "steps", "gradient_rows", "allreduce_bytes"):
                assert on_device["counted"][name] == on_cpu["counted"][name]


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("number", [2, 4])
def test_training(
    two: Ranks, four: Ranks, emulated: Path, emulated_nvshmem: Path, number: int, fetch: str
) -> None:
    """Rows come one-sided; their gradients go to their owners, which update them before anybody
    looks them up again."""
    modules = [
        Case(1, number, optimizer="adagrad", rows=(50, 7, 400, 30)),
        Case(2, number, weighted=True, pooling="mean", optimizer="adam"),
        Case(3, number, pooling="none", dims=(5, 33), optimizer="rowwise_adagrad"),
        Case(4, number, dtype="fp16", optimizers=("none", "sgd")),
    ]
    cases = [(case, plan_of(case, mode="training", fetch=fetch)) for case in modules]
    assert_trains_as_on_the_cpu(two if number == 2 else four, cases, emulated, emulated_nvshmem)


@examples(10)
@given(
    seed=st.integers(0, 10_000),
    number=st.sampled_from([2, 4]),
    fetch=st.sampled_from(["raw", "distinct"]),
    replicated=st.sampled_from([0.0, 0.3, 1.0]),
    optimizer=st.sampled_from([*STATES]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dims=st.lists(st.sampled_from([1, 4, 8, 33]), min_size=1, max_size=3),
    rows=st.lists(st.sampled_from([1, 7, 300]), min_size=1, max_size=4),
    bags=st.sampled_from(["many", "one", "mean one", "none"]),
    weighted=st.booleans(),
)
def test_any_module_is_trained(
    two: Ranks,
    four: Ranks,
    emulated: Path,
    emulated_nvshmem: Path,
    seed: int,
    number: int,
    fetch: str,
    replicated: float,
    optimizer: str,
    pooling: str,
    dims: list[int],
    rows: list[int],
    bags: str,
    weighted: bool,
) -> None:
    case = Case(
        seed, number, optimizer=optimizer, pooling=pooling, dims=tuple(dims), rows=tuple(rows),
        bags=bags, weighted=weighted and pooling != "none",
    )  # fmt: skip
    plan = plan_of(case, mode="training", fetch=fetch, replicated=replicated)
    ranks = two if number == 2 else four
    assert_trains_as_on_the_cpu(ranks, [(case, plan)], emulated, emulated_nvshmem)


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_rows_are_read_once_they_are_updated(
    two: Ranks, emulated: Path, emulated_nvshmem: Path, fetch: str
) -> None:
    case = Case(23, 2)
    plan = plan_of(case, mode="training", fetch=fetch)
    given = (case, plan, str(emulated), str(emulated_nvshmem))
    assert all(two.run(2, nvshmem_engines.train_after_late_updates, *given))


def test_devices_are_done_before_other_nodes_are_told(
    two: Ranks, emulated: Path, emulated_nvshmem: Path
) -> None:
    """Where a rank is alone on its node, no signal waits for its device."""
    case = Case(24, 2)
    plan = plan_of(case, mode="training", fetch="distinct")
    given = (case, plan, str(emulated), str(emulated_nvshmem))
    for done in two.run(2, nvshmem_engines.told_nodes, *given):
        first, last = done.index("read its rows (step 1)"), done.index("update its rows (step 1)")
        assert done[first - 1] == done[last - 1] == "device is done"
        told = done.index("exchange gradients (step 1)")  # how many: they are not there yet
        room = "make room for gradients of other nodes' rows"  # in the first step
        assert {*done[told + 1 : first]} == {"device is done", room}
        # Kernels bring them: of replicas alone hosts exchange more.
        assert {*done[first + 1 : last]} == {"update", "sum replicas", "device is done"}
        assert "update" not in done[:first]
        assert "update" in done[first:last]
        assert done[last + 1 :] == []


@pytest.mark.parametrize("at", ["published", "exchange gradients", "applied", "update its rows"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_rank_that_dies_in_training_is_named(
    emulated: Path, emulated_nvshmem: Path, number: int, at: str
) -> None:
    case = Case(22, number, optimizer="adagrad")
    plan = plan_of(case, mode="training", fetch="distinct")
    given = (case, plan, str(emulated), str(emulated_nvshmem), at)
    dead = number - 1
    found = mortal_ranks.run(number, nvshmem_engines.train_until_a_death, *given, silent=[dead])
    for rank in range(dead):
        assert re.search(rf"rank {dead} .*(died|disconnected|sign of life)", str(found[rank]))


def test_a_row_for_each_access_is_refused_without_it(
    emulated: Path, emulated_nvshmem: Path
) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case, "collective"), str(emulated), str(emulated_nvshmem))
    for outcome in mortal_ranks.run(2, nvshmem_engines.refused, *given):
        assert "for inference with transport: nvshmem in the topology" in str(outcome)


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        ([30405, 30501], "of unlike versions (rank 0: 3.4.5, rank 1: 3.5.1): install one on all"),
        ([30302, 30302], "NVSHMEM 3.3.2 is installed, and the kernels were built for 3.4.5"),
        ([40000, 40000], "NVSHMEM 4.0.0 is installed, and the kernels were built for 3.4.5"),
        ([30501, 30501], ""),
    ],
)
def test_an_nvshmem_of_another_version(
    emulated: Path, emulated_nvshmem: Path, versions: list[int], error: str
) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case), str(emulated), str(emulated_nvshmem), versions)
    for outcome in mortal_ranks.run(2, nvshmem_engines.start_of_version, *given):
        assert error in str(outcome)


def test_without_nvshmem_all_ranks_say_so(emulated: Path) -> None:
    case = Case(1, 2)
    given = (case, plan_of(case), str(emulated), "")
    for outcome in mortal_ranks.run(2, nvshmem_engines.refused, *given):
        assert "there is no NVSHMEM" in str(outcome)


def test_libraries_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot load NVSHMEM's kernels: .*none\.so"):
        native.ops().load_nvshmem_library(str(tmp_path / "none.so"), "")
    with pytest.raises(RuntimeError, match=r"cannot load NVSHMEM: .*libno"):
        native.ops().load_nvshmem_library(str(tmp_path / "none.so"), "libno.so")
    native.load_nvshmem.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "base/native.py"))
    error = r"transport is nvshmem: cannot load NVSHMEM.*pip install nvidia-nvshmem.*build_cuda"
    with pytest.raises(OperError, match=error):
        native.load_nvshmem()


def test_ranks_whose_plans_have_other_transports(emulated: Path, emulated_nvshmem: Path) -> None:
    case = Case(1, 2)
    plan = plan_of(case)
    other = replace(plan, topology=replace(plan.topology, transport="collective"))
    given = (case, plan, other, str(emulated), str(emulated_nvshmem))
    for outcome in mortal_ranks.run(2, _unlike, *given):
        assert outcome is not None


def _unlike(
    rank: int, group: Any, case: Case, plan: Any, other: Any, kernels: str, nvshmem: str
) -> None:
    nvshmem_engines.refused(rank, group, case, (plan, other)[rank], kernels, nvshmem)
