"""OperShardingPlanner in the place of TorchRec's: what it takes, plans, logs and refuses."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.types import ShardingEnv

import oper
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.profiling.profile import Profile
from oper.runtime.memory.runtime_plan import check_for_devices, check_nodes
from oper.tables.table import Table, tables_of
from oper.topology.latency import Latency
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.module_tables import match_tables
from oper.torchrec.planning.planner_inputs import from_torchrec, profile_of
from tests.planner.test_place_by_table import write_bags
from tests.planner.test_place_pooled import topology
from tests.support.torchrec.models import BAGS, Model

SAMPLES = 10_000


def a_profile(*tables: Table, seed: int = 0) -> Profile:
    random = np.random.default_rng(seed)
    rows = sum(table.rows for table in tables)
    counts = (random.zipf(1.3, rows) % 4000).astype(np.uint32)
    bagged = tuple(n % 2 == 0 for n in range(len(tables)))
    samples_with_row = [np.zeros(0, np.uint32)]
    first = 0
    for table, has in zip(tables, bagged, strict=True):
        if has:
            samples_with_row.append(counts[first : first + table.rows] // 2)
        first += table.rows
    return Profile(tables, SAMPLES, counts, np.concatenate(samples_with_row), bagged)


@pytest.fixture
def model() -> Model:
    return Model("meta")


@pytest.fixture
def profile(model) -> Profile:
    # Of another width and optimizer: counts do not depend on them.
    return a_profile(*(replace(t, dim=3, optimizer="adam") for t in tables_of(model)))


def test_plans_have_torchrecs_form_and_carry_ours(model, profile):
    plan = oper.OperShardingPlanner("cpu:3", profile, batch_size=64).plan(model)
    assert set(plan.plan) == {"bags", "weighted", "sequences"}
    content = plan._serialize()["plan"]["bags"]
    assert content["wide"]["sharding_type"] == "row_wise"
    assert [s["shard_sizes"] for s in content["wide"]["shards"]] == [[17, 16], [17, 16], [16, 16]]
    assert [s["shard_sizes"] for s in content["tiny"]["shards"]] == [[1, 4], [0, 4], [0, 4]]
    ours = plan.oper_plan
    assert ours.ranks == 3
    assert ours.workload.batch_size == 3 * 64
    assert [(t.name, t.dim, t.optimizer) for t in ours.tables] == [
        (t.name, t.dim, "sgd") for t in tables_of(model)
    ]


def test_the_sharders_optimizers_are_planned_for(model, profile):
    fused = {"optimizer": "exact_row_wise_adagrad"}
    sharders = [oper.OperEmbeddingBagCollectionSharder(fused_params=fused)]
    plan = oper.OperShardingPlanner("cpu:2", profile).plan(model, sharders)
    assert set(plan.plan) == {"bags", "weighted"}  # no sharder takes the sequences
    assert {t.optimizer for t in plan.oper_plan.tables} == {"rowwise_adagrad"}


def test_plans_are_asked_for_in_the_planners_words(model, profile):
    planner = oper.OperShardingPlanner(
        "cpu:3",
        profile,
        mode="inference",
        fetch="distinct",
        settings=PlanSettings(extra_memory=0.5),
    )
    plan = planner.plan(model).oper_plan
    assert plan.workload == Workload("inference", "distinct", 3 * 512)  # TorchRec's batch size
    assert plan.asked.extra_memory == 0.5
    for ranks, fetch in (("cpu:2", "raw"), ("2x2-a100", "distinct")):
        made = oper.OperShardingPlanner(ranks, profile).plan(model).oper_plan
        assert made.workload.fetch == fetch


def test_tables_are_pooled_where_that_is_asked_for(tmp_path, caplog):
    """As `oper plan` does."""
    counted = write_bags(tmp_path)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name, embedding_dim=8, num_embeddings=table.rows, feature_names=[name]
            )
            for table, name in zip(counted.tables, "abcd", strict=True)
        ]
    )
    ranks = replace(topology(), latency=Latency.of_hops(0.0))
    settings, found = PlanSettings(extra_memory=0.5), {}
    for fetch in (None, "auto", "pooled"):
        planner = oper.OperShardingPlanner(
            ranks, counted, batch_size=2048 // ranks.ranks, fetch=fetch, settings=settings
        )
        with caplog.at_level(logging.INFO, logger="oper"):
            plan = planner.plan(collection).oper_plan
        mine = profile_of(counted, plan.tables)
        same = oper.make_plan(mine, ranks, Workload("training", fetch, 2048), settings)
        assert plan.cost.objective_seconds == same.cost.objective_seconds
        found[fetch] = plan.pooled_tables
    some = "few", "many", "more"
    assert found == {None: some, "auto": some, "pooled": (*some, "single")}
    assert "fetch distinct, pooled of 3 of 4 tables" in caplog.text


def test_statistics_are_logged(model, profile, caplog):
    with caplog.at_level(logging.INFO, logger="oper"):
        oper.OperShardingPlanner("cpu:2", profile, batch_size=64).plan(model)
    lines = [record.getMessage() for record in caplog.records]
    assert any("--- Planner Statistics ---" in line for line in lines)
    assert len({len(line) for line in lines}) == 1
    assert any("bags.wide" in line and " 50 " in line for line in lines)
    assert any("Batch Size: 64 per rank, 128 over 2 ranks" in line for line in lines)


def test_torchrecs_topology():
    cpu = from_torchrec(TorchRecTopology(4, "cpu", local_world_size=2, inter_host_bw=1e6))
    assert cpu.node_of == (0, 0, 1, 1)
    assert cpu.link_cost[0, 0] == cpu.link_cost[0, 1] < cpu.link_cost[0, 2]
    cuda = from_torchrec(TorchRecTopology(2, "cuda", hbm_cap=10**9, hbm_mem_bw=1e9))
    assert cuda.link_cost[0, 0] == pytest.approx(1e-12)
    assert cuda.device_memory_bytes == (10**9, 10**9)


def test_what_devices_cannot_do_is_refused(profile):
    topology = TorchRecTopology(4, "cuda", local_world_size=2)
    with pytest.raises(OperError, match="2 nodes, fetch raw: on CUDA devices distinct rows cross"):
        oper.OperShardingPlanner(topology, profile, fetch="raw")


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("fetch", [None, "distinct"])
def test_work_on_devices_of_several_nodes_is_planned(model, profile, mode, fetch):
    topology = TorchRecTopology(4, "cuda", local_world_size=2)
    planner = oper.OperShardingPlanner(topology, profile, mode=mode, fetch=fetch)
    plan = planner.plan(model).oper_plan
    assert (plan.ranks, plan.topology.nodes) == (4, 2)
    assert plan.workload.fetch == "distinct"
    check_for_devices(plan, "cuda:0")
    check_nodes([(0, 1), (2, 3)], plan, "cuda:0")


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("topology", [TorchRecTopology(8, "cuda"), "dgx-h100"])
def test_work_on_devices_is_planned(model, profile, topology, mode):
    planner = oper.OperShardingPlanner(topology, profile, mode=mode)
    plan = planner.plan(model).oper_plan
    assert (plan.ranks, plan.workload.mode, plan.workload.fetch) == (8, mode, "raw")
    assert plan.topology.memory == ("linked",)
    # What a step takes is left beside rows, and twice as many samples take twice as much.
    memory = planner._topology.device_memory_bytes
    assert memory is not None
    left = int(0.8 * memory[0]) - plan.cost.capacity_bytes
    assert plan.cost.mailbox_bytes > 512 * 48
    assert left == pytest.approx(plan.cost.step_bytes, abs=2)
    twice = oper.OperShardingPlanner(topology, profile, mode=mode, batch_size=1024)
    assert twice.plan(model).oper_plan.cost.mailbox_bytes == pytest.approx(
        2 * plan.cost.mailbox_bytes, abs=1
    )


def test_tables_beyond_torchrecs_capacities(model, profile):
    topology = TorchRecTopology(2, "cpu", ddr_cap=100)
    with pytest.raises(OperError, match="rank 0 needs"):
        oper.OperShardingPlanner(topology, profile).plan(model)


def test_constraints_that_do_nothing_are_named(profile, caplog):
    constraints = {"wide": ParameterConstraints(pooling_factors=[2.0])}
    oper.OperShardingPlanner("cpu:2", profile, constraints=constraints)
    assert "table 'wide' have no effect: pooling_factors" in caplog.text
    constraints = {"wide": ParameterConstraints(use_virtual_table=True)}
    with pytest.raises(OperError, match="virtual"):
        oper.OperShardingPlanner("cpu:2", profile, constraints=constraints)


def test_torchrecs_sharders_cannot_shard_by_our_plans(model, profile, caplog):
    planner = oper.OperShardingPlanner("cpu:1", profile)
    sharder = EmbeddingBagCollectionSharder()
    plan = planner.plan(model, [sharder])
    assert "bags: TorchRec's EmbeddingBagCollectionSharder cannot shard by this plan" in caplog.text
    with pytest.raises(ValueError, match="Compute kernel not supported"):
        sharder.shard(model.bags, plan.plan["bags"], ShardingEnv.from_local(1, 0))


def test_models_that_no_sharder_takes(model, profile):
    planner = oper.OperShardingPlanner("cpu:2", profile)
    with pytest.raises(OperError, match="no collection that the sharders take"):
        planner.plan(model, [])


def test_tables_of_one_name_in_two_collections(model, profile):
    plan = oper.OperShardingPlanner("cpu:2", profile).plan(model).oper_plan
    model.twin = EmbeddingBagCollection([BAGS[0]], device=torch.device("meta"))
    with pytest.raises(OperError, match="table 'wide': 'bags' and 'twin' both have one"):
        oper.OperShardingPlanner("cpu:2", profile).plan(model)
    with pytest.raises(OperError, match="table 'wide': 'bags' and 'twin' both have one"):
        oper.torchrec_plan(plan, model)


def test_models_that_lack_tables_or_have_others(model, profile, caplog):
    plan = oper.OperShardingPlanner("cpu:2", profile).plan(model).oper_plan
    stranger = replace(BAGS[0], name="stranger")
    model.bags = EmbeddingBagCollection([stranger], device=torch.device("meta"))
    text = r"^bags: the plan has none of its 1 tables \(stranger\), and it will be data-parallel"
    with pytest.warns(UserWarning, match=text):
        assert set(oper.torchrec_plan(plan, model).plan) == {"weighted", "sequences"}
    assert "4 of the plan's 7 tables are not in Model (mean, …)" in caplog.text
    del model.weighted, model.sequences
    with pytest.raises(OperError, match=r"it has stranger, and the plan [a-z, ]+, …; make a plan"):
        oper.torchrec_plan(plan, model)


def test_other_optimizers_are_named_once(model, profile, caplog):
    planner = oper.OperShardingPlanner("cpu:1", profile)
    plan = planner.plan(model, [oper.OperEmbeddingBagCollectionSharder()]).oper_plan
    tables = tuple(replace(table, optimizer="adam") for table in plan.tables)
    match_tables(replace(plan, tables=tables), model.bags, None, ModelWarnings())
    (warned,) = (r.getMessage() for r in caplog.records if "balance of memory" in r.getMessage())
    assert (
        f" and at least {len(BAGS) - 1} more: the plan was made for adam, and sgd is what" in warned
    )


def test_profiles_of_other_tables(model, profile):
    tables = list(tables_of(model))
    with pytest.raises(OperError, match="'wide': the profile has no such table; it has mean"):
        oper.OperShardingPlanner("cpu:2", a_profile(*tables[1:])).plan(model)
    tables[0] = replace(tables[0], rows=51)
    with pytest.raises(OperError, match="the profile has 51 rows, and the model 50"):
        oper.OperShardingPlanner("cpu:2", a_profile(*tables)).plan(model)
    with pytest.raises(OperError, match="no profile"):
        oper.OperShardingPlanner("cpu:2")
    with pytest.raises(OperError, match="no process group"):
        oper.OperShardingPlanner(None, profile)


def test_some_of_a_profiles_tables():
    bags = EmbeddingBagCollection(list(BAGS), device=torch.device("meta"))
    tables = tables_of(bags)
    spare = Table("spare", 7, 4)
    whole = a_profile(tables[2], spare, tables[0], tables[1], tables[3])
    part = profile_of(whole, tables)
    assert [t.name for t in part.tables] == ["tiny", "wide", "mean", "other"]
    assert part.bagged == (True, True, False, True)
    for mine, n in enumerate((0, 2, 3, 4)):
        assert (part.table_accesses(mine) == whole.table_accesses(n)).all()
        assert (part.table_samples_with_row(mine) == whole.table_samples_with_row(n)).all()
