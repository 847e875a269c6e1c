"""Training on cached rows of the tier against the unsharded model, element by element."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from oper.cost.cache_replay import CacheReplay
from oper.plan.plan import Plan
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import Table
from tests.scheduler.staleness_model import StalenessModel
from tests.scheduler.state_model import StateModel
from tests.support.examples import examples
from tests.support.runtime.engine_cases import Case, Reference, batch_of, features_of, tables_of
from tests.support.runtime.ranks import RankFailedError
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds
from tests.support.scheduler.cached_cases import Script, run_cached, run_on_a_full_host

PLAIN = Script()
TOLERANCE = {"fp32": 5e-5, "fp16": 2e-2, "bf16": 1e-1}


def assert_equals_unsharded(
    ranks: Worlds, case: Case, plan: Any, cache: CacheSettings, script: Script = PLAIN, nodes=None
) -> dict[str, list[int]]:
    found = ranks.run(case.ranks, run_cached, case, plan, cache, script, nodes)
    reference = Reference(case)
    near: dict[str, Any] = {"rtol": TOLERANCE[case.dtype], "atol": TOLERANCE[case.dtype]}
    evaluated = [iter(of_rank["evaluated"]) for of_rank in found]

    def compare_evaluations(step: int) -> None:
        for rank in range(case.ranks * (step in script.evaluate)):
            out, _, _ = reference.lookup(batch_of(case, step, rank))
            torch.testing.assert_close(next(evaluated[rank]).double(), out.detach(), **near)

    for steps in script.updates(case.steps):
        *held, last = steps
        for step in held:
            compare_evaluations(step)
        reference.rate = script.rate(last)
        if set(script.recount).intersection(steps):
            reference.step_count = 0
        outputs, weight_grads = reference.train(*steps)
        for n, out in enumerate(outputs):
            step, rank = steps[n // case.ranks], n % case.ranks
            mine = found[rank]["outputs"][step].double()
            torch.testing.assert_close(mine, out, **near, msg=f"step {step}, rank {rank}")
            if weight_grads[n] is not None:
                mine = found[rank]["weight_grads"][step].double()
                torch.testing.assert_close(mine, weight_grads[n], **near)
        compare_evaluations(last)
    for rank in range(case.ranks):
        assert next(evaluated[rank], None) is None
        for n, table in enumerate(reference.tables):
            mine = found[rank]["tables"][n].double()
            torch.testing.assert_close(mine, table, **near, msg=f"table {n}, rank {rank}")
    assert all(of_rank["counted"] == found[0]["counted"] for of_rank in found)
    return found[0]["counted"]


def tiered(seed: int, tables: tuple[Table, ...], ranks: int, **options: Any) -> Plan:
    """A random plan with all tables in the tier."""
    return random_plan(seed, tables, ranks, tier=tuple(range(len(tables))), **options)


LATE = Case(0, 2, rows=(250, 1, 400), steps=6)
cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.sampled_from([1, 2, 4]),
    optimizer=st.sampled_from(
        ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "momentum_sgd"]
    ),
    optimizers=st.sampled_from([(), (), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dims=st.sampled_from([(4,), (8, 16), (64, 4)]),
    rows=st.sampled_from([(300,), (250, 1, 400), (150, 200, 150, 400)]),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    steps=st.integers(3, 9),
)
RATES = (1.0, 0.25, 1.5, 0.5, 0.125)
scripts = st.builds(
    Script,
    evaluate=st.sampled_from([(), (1,), (0, 2)]),
    between=st.sampled_from([(), (), (1,), (0, 2)]),
    save=st.sampled_from([(), (1,)]),
    untrained=st.sampled_from([(), (0,), (1, 2)]),
    ahead=st.booleans(),
    late=st.sampled_from([(), (), (1,)]),
    held=st.sampled_from([(), (), (1,), (0, 1)]),
    rates=st.sampled_from([(1.0,), RATES]),
    recount=st.sampled_from([(), (), (2,), (1, 3)]),
)


@examples(30)
@given(
    cases,
    st.sampled_from(["30%", "50%", "100%"]),
    st.sampled_from(["bsp", "on-demand", "peer"]),
    st.sampled_from(["lru", "lfu", "light-lfu", "emark"]),
    scripts,
    st.sampled_from([None, (0, 1), (1,), (0,)]),
    st.sampled_from(["raw", "distinct"]),
)
@example(
    Case(0, 2, rows=(250, 1, 400), steps=6),
    "30%",
    "on-demand",
    "lru",
    Script(late=(1,)),
    None,
    "raw",
)
def test_any_cache_trains_as_the_unsharded_model(
    ranks, case, size, sync, evict, script, tier, fetch
):
    tables = range(len(case.rows)) if tier is None else tier
    chosen = tuple(t for t in tables if t < len(case.rows))
    plan = random_plan(case.seed, tables_of(case), case.ranks, tier=chosen, fetch=fetch)
    assert_equals_unsharded(ranks, case, plan, CacheSettings(size, sync, evict), script)


@examples(15)
@given(
    cases.map(lambda case: replace(case, pooling="none", bags="mean one")),
    st.sampled_from(["on-demand", "bsp", "peer"]),
    st.sampled_from([(0,), (1,), (0, 2)]),
)
def test_sequences_of_which_some_tables_are_in_the_tier(ranks, case, sync, tier):
    """A batch has as many ids as features times samples, of any lengths, and other tables are in
    memory."""
    case = replace(case, rows=(250, 90, 400))
    plan = random_plan(case.seed, tables_of(case), case.ranks, tier=tier)
    assert_equals_unsharded(ranks, case, plan, CacheSettings("60%", sync))


@pytest.mark.parametrize("nodes", [None, (0, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_are_fetched_beside_cached_ones_of_their_width(ranks, nodes, weighted):
    """Tables of the tier that are not trained are fetched by distinct rows, others are cached."""
    case = Case(7, 2, dims=(8,), rows=(250, 90, 400), steps=6, weighted=weighted)
    case = replace(case, optimizers=("none", "adagrad", "none"))
    plan = tiered(3, tables_of(case), 2, fetch="distinct")
    script = Script(evaluate=(2,), late=(3,))
    assert_equals_unsharded(ranks, case, plan, CacheSettings("60%"), script, nodes)


HOT = Case(3, 2, rows=(250, 100, 400), steps=8)  # 40 % of its accesses read row 0


@examples(12)
@given(
    cases.map(lambda case: replace(case, optimizer="sgd", optimizers=(), plain=True)),
    st.sampled_from(["30%", "100%"]),
    st.sampled_from(["lru", "emark"]),
    scripts,
)
def test_het_exact_without_staleness_is_bulk_synchronous(ranks, case, size, evict, script):
    plan = tiered(case.seed, tables_of(case), case.ranks)
    cache = CacheSettings(size, "het-exact:0", evict)
    counted = assert_equals_unsharded(ranks, case, plan, cache, script)
    assert sum(counted["wrong_reads"]) == 0


@pytest.mark.parametrize("sync", ["het:2", "het-exact:2", "het:inf"])
def test_stale_reads_end_at_the_flush(ranks, sync):
    """SGD's steps commute where gradients are given, so that all of them are in the tables at the
    end, however late they came."""
    case = replace(HOT, plain=True)
    plan = tiered(3, tables_of(case), 2)
    found = ranks.run(2, run_cached, case, plan, CacheSettings("50%", sync), PLAIN)
    reference = Reference(case)
    for step in range(HOT.steps):
        reference.train(step)
    for mine, table in zip(found[0]["tables"], reference.tables, strict=True):
        torch.testing.assert_close(mine.double(), table, rtol=1e-4, atol=1e-4)
    assert sum(found[0]["counted"]["wrong_reads"]) > 0


@pytest.mark.parametrize("sync", ["bsp", "on-demand", "peer"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)])
def test_ranks_that_share_no_memory(ranks, sync, nodes):
    case = replace(HOT, ranks=len(nodes), optimizer="adam")
    plan = tiered(3, tables_of(case), case.ranks, fetch="distinct")
    script = Script(evaluate=(2,), save=(4,))
    assert_equals_unsharded(ranks, case, plan, CacheSettings("40%", sync), script, nodes)


@pytest.mark.parametrize("sync", ["bsp", "on-demand"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gradients_accumulate(ranks, sync, optimizer):
    case = replace(HOT, optimizer=optimizer, steps=9)
    plan = tiered(3, tables_of(case), 2)
    script = Script(held=(0, 1, 3, 4, 6, 7), evaluate=(4, 5))
    assert_equals_unsharded(ranks, case, plan, CacheSettings("40%", sync), script)


SYNCS = ("bsp", "on-demand", "peer")
OPTIMIZERS = ("sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")


# Every two of the three parameters meet in what is not slow.
@pytest.mark.parametrize(
    ("sync", "optimizer", "held"),
    [
        pytest.param(sync, optimizer, held, marks=[pytest.mark.slow] if (s + o + h) % 2 else [])
        for s, sync in enumerate(SYNCS)
        for o, optimizer in enumerate(OPTIMIZERS)
        for h, held in enumerate([(), (2, 3, 6, 9)])
    ]
    + [("het-exact:0", "sgd", held) for held in [(), (2, 3, 6, 9)]],  # HET is for plain SGD
)
def test_a_row_steps_at_the_rate_of_its_step(ranks, sync, optimizer, held):
    """However late its gradients come together, when other rows step at other rates; also where
    the steps are counted anew."""
    case = replace(HOT, ranks=4 if held else 2, optimizer=optimizer, steps=12)
    case = replace(case, lrs=(0.5, 0.25, 0.375), plain=sync.startswith("het"))
    plan = tiered(3, tables_of(case), case.ranks)
    for recount in ((), (4, 8)):
        script = Script(held=held, rates=RATES, recount=recount)
        assert_equals_unsharded(ranks, case, plan, CacheSettings("60%", sync), script)


def assert_moves_as_if_still(ranks, case, plans, cache, script, nodes=None) -> tuple[Any, Any]:
    """Ranks whose rows migrate from the first plan to the others compute every bit that ranks do
    whose rows stay; what the first of both found."""
    still = ranks.run(case.ranks, run_cached, case, plans[0], cache, script, nodes)
    script = replace(script, moves=tuple(plans[1:]))
    moved = ranks.run(case.ranks, run_cached, case, plans[0], cache, script, nodes)
    for mine, others in zip(moved, still, strict=True):
        for name in ("outputs", "evaluated", "tables"):
            for a, b in zip(mine[name], others[name], strict=True):
                assert torch.equal(a, b), name
    return moved[0], still[0]


@examples(25)
@given(
    cases.map(lambda case: replace(case, steps=case.steps + 4)),
    st.sampled_from(["30%", "100%"]),
    st.sampled_from(["bsp", "on-demand", "peer"]),
    st.sampled_from(["lru", "emark"]),
    scripts,
    st.sampled_from([None, (0, 1), (1,)]),
    st.sampled_from([1, 1000, 1 << 20]),
    st.booleans(),
    st.sampled_from(["raw", "distinct"]),
)
def test_cached_rows_migrate_and_no_bit_changes(
    ranks, case, size, sync, evict, script, tier, bytes_per_step, between, fetch
):
    tables = [t for t in range(len(case.rows)) if tier is None or t in tier]
    plans = [
        random_plan(case.seed + n, tables_of(case), case.ranks, replicated=0.3, tier=tuple(tables))
        for n in range(3)
    ]
    script = replace(script, bytes_per_step=bytes_per_step, moves_between=between)
    cache = CacheSettings(size, sync, evict)
    moved, _ = assert_moves_as_if_still(ranks, case, plans, cache, script)
    assert moved["moved"] > 0 or case.ranks == 1


@pytest.mark.parametrize("sync", ["bsp", "on-demand", "peer"])
@pytest.mark.parametrize("nodes", [None, (0, 1)])
def test_caches_keep_the_rows_that_migrate(ranks, sync, nodes):
    case = replace(HOT, optimizer="adam", steps=16)
    plans = [tiered(n, tables_of(case), 2, fetch="distinct") for n in range(3)]
    cache = CacheSettings("60%", sync)
    moved, still = assert_moves_as_if_still(ranks, case, plans, cache, PLAIN, nodes)
    assert moved["moved"] > 8
    for name in ("hits", "reads", "wrong_reads"):
        assert moved["counted"][name] == still["counted"][name]
    # What the tier got when rows moved comes from there, which else a peer may have sent.
    pulled = [sum(found["counted"]["miss_pull"]) for found in (moved, still)]
    by_peers = [sum(found["counted"]["peer_push"]) for found in (moved, still)]
    assert pulled[0] + by_peers[0] == pulled[1] + by_peers[1]
    assert by_peers[0] < by_peers[1] or sync != "peer"
    pushed = [sum(found["counted"]["update_push"]) for found in (moved, still)]
    assert pushed[0] > pushed[1] or sync == "bsp"


@pytest.mark.parametrize("sync", ["het:2", "het-exact:2", "het"])
def test_rows_with_stale_copies_migrate(ranks, sync):
    case = replace(HOT, plain=True, steps=16)
    plans = [tiered(n, tables_of(case), 2) for n in range(3)]
    script = Script(moves=tuple(plans[1:]))
    found = ranks.run(2, run_cached, case, plans[0], CacheSettings("50%", sync), script)
    reference = Reference(case)
    for step in range(case.steps):
        reference.train(step)
    assert found[0]["moved"] > 8
    for mine, table in zip(found[0]["tables"], reference.tables, strict=True):
        torch.testing.assert_close(mine.double(), table, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("late", [(), (1, 3)])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weights_and_their_gradients(ranks, pooling, late):
    case = replace(HOT, weighted=True, pooling=pooling)
    plan = tiered(3, tables_of(case), 2)
    assert_equals_unsharded(ranks, case, plan, CacheSettings("40%"), Script(late=late))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_rows(ranks, dtype):
    case = replace(HOT, dtype=dtype, lr=0.125)
    plan = tiered(3, tables_of(case), 2)
    assert_equals_unsharded(ranks, case, plan, CacheSettings("40%"))


def test_replicas_and_cached_rows_side_by_side(ranks):
    case = replace(HOT, ranks=4, optimizer="rowwise_adagrad")
    plan = random_plan(3, tables_of(case), 4, replicated=0.3, tier=(1,))
    assert_equals_unsharded(ranks, case, plan, CacheSettings("40%"))


@pytest.mark.parametrize("sync", ["bsp", "on-demand", "peer", "het-exact:0"])
def test_an_evaluation_between_forward_and_backward(ranks, sync):
    case = replace(HOT, steps=2, plain=True)
    script = Script(between=(1,), evaluate=(1,))
    plan = tiered(3, tables_of(case), 2)
    assert_equals_unsharded(ranks, case, plan, CacheSettings("50%", sync), script)


def test_rows_leave_the_cache_with_their_updates(ranks):
    plan = tiered(3, tables_of(HOT), 2)
    counted = assert_equals_unsharded(ranks, replace(HOT, steps=12), plan, CacheSettings("15%"))
    assert sum(counted["evict_push"]) > 0
    assert sum(counted["wrong_reads"]) == 0


@pytest.mark.parametrize("size", ["0.001%", "1%", "1KB"])
def test_a_cache_smaller_than_a_batch(ranks, size):
    case = replace(HOT, dims=(8, 16), steps=1)
    plan = tiered(3, tables_of(case), 2)
    with pytest.raises(
        RankFailedError, match=f"tables 't0' and 2 more: a cache of {size}"
    ) as error:
        ranks.run(2, run_cached, case, plan, CacheSettings(size), PLAIN)
    # What it says is enough.
    (least,) = set(re.findall(r"([\d,]+) bytes, .* would be enough", str(error.value)))
    enough = CacheSettings(f"{least.replace(',', '')}B")
    assert_equals_unsharded(ranks, case, plan, enough)


def test_a_host_without_memory_for_the_replay(ranks):
    case = replace(HOT, steps=1)
    plan = tiered(3, tables_of(case), 2)
    rows = sum(table.rows for table in plan.tables)
    needed = 2 * CacheReplay.of(2, rows, rows).total_bytes  # two ranks share the host
    settings = CacheSettings("100%")
    ranks.run(2, run_on_a_full_host, case, plan, settings, needed)
    with pytest.raises(
        RankFailedError,
        match=f"the replay of all ranks' caches of 100% takes {needed:,} bytes .*smaller size",
    ):
        ranks.run(2, run_on_a_full_host, case, plan, settings, needed - 1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])  # the latter with weight decay
def test_het_takes_plain_sgd_alone(ranks, optimizer):
    case = replace(HOT, optimizer=optimizer)
    plan = tiered(3, tables_of(case), 2)
    with pytest.raises(RankFailedError, match="which plain SGD alone applies"):
        ranks.run(2, run_cached, case, plan, CacheSettings("50%", "het:10"), PLAIN)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("evict", ["lru", "lfu", "emark"])
@pytest.mark.parametrize("sync", ["bsp", "on-demand"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_what_moves_is_what_the_state_model_says(ranks, count, evict, sync, pooling):
    """On the same trace the runtime counts what the reference of the simulator does."""
    case = Case(5, count, dims=(8,), rows=(200, 300), steps=12, bags="many", pooling=pooling)
    plan = tiered(5, tables_of(case), count)
    found = ranks.run(count, run_cached, case, plan, CacheSettings("16%", sync, evict), PLAIN)
    model = StateModel(count, math.ceil(0.16 * sum(case.rows)), sync == "on-demand", evict)
    expected = np.zeros((count, 4), dtype=np.int64)
    for step in range(case.steps):
        samples, assignment = [], []
        for rank in range(count):
            mine = samples_of(batch_of(case, step, rank), case)
            samples += mine
            assignment += [rank] * len(mine)
        expected += np.array(model.iteration(samples, assignment))
    counted = [found[0]["counted"][n] for n in ("miss_pull", "update_push", "evict_push", "hits")]
    assert expected.T.tolist() == counted
    assert count == 1 or sync == "bsp" or (expected.sum(axis=0) > 0).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("sync", ["het", "het:2", "het-exact:2"])
def test_what_moves_is_what_the_staleness_model_says(ranks, count, sync):
    case = Case(5, count, dims=(8,), rows=(200, 300), steps=12, bags="many", plain=True)
    plan = tiered(5, tables_of(case), count)
    cache = CacheSettings("16%", sync)
    found = ranks.run(count, run_cached, case, plan, cache, PLAIN)
    capacity = math.ceil(0.16 * sum(case.rows))
    model = StalenessModel(count, capacity, cache.synchronisation)
    expected, lag = np.zeros((count, 5), dtype=np.int64), np.zeros(count, dtype=np.int64)
    for step in range(case.steps):
        samples, assignment = [], []
        for rank in range(count):
            mine = samples_of(batch_of(case, step, rank), case)
            samples += mine
            assignment += [rank] * len(mine)
        moved = np.array(model.iteration(samples, assignment))
        expected += moved[:, :5]
        lag = np.maximum(lag, moved[:, 5])
    names = ("miss_pull", "update_push", "evict_push", "hits", "wrong_reads")
    counted = found[0]["counted"]
    assert [counted[name] for name in names] == expected.T.tolist()
    assert counted["lag"] == lag.tolist()
    assert count == 1 or (expected.sum(axis=0) > 0).all()


def samples_of(batch: Any, case: Case) -> list[list[int]]:
    """The rows of each sample of a batch, numbered through all tables."""
    first = [sum(case.rows[:table]) for table in range(len(case.rows))]
    bases = [first[n] for n in range(len(case.rows)) for _ in features_of(case, n)]
    bags = [jagged.to_dense() for jagged in batch.to_dict().values()]
    return [
        [base + int(row) for base, of_key in zip(bases, bags, strict=True) for row in of_key[s]]
        for s in range(batch.stride())
    ]
