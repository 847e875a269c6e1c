"""The sharders' settings, the plans they take, and the groups that they work on."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from torchrec.distributed.types import ShardingEnv2D

import oper
from oper.base.errors import OperError
from oper.tables.table import tables_of
from oper.topology.topology import Topology
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import sharder_cases as cases
from tests.support.torchrec import training_cases
from tests.support.torchrec.models import Model


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_ranks_that_share_no_memory_train_as_the_unsharded_model(worlds, kind):
    worlds.run(2, training_cases.train_and_compare, kind, 0.3, nodes=(0, 1))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_nodes_of_several_ranks_train_as_the_unsharded_model(worlds, kind):
    between = {"nodes": (0, 0, 1, 1), "fetch": "distinct"}
    worlds.run(4, training_cases.train_and_compare, kind, 0.3, **between)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("int8", 0.05)])
def test_plans_for_inference_read_as_the_unsharded_model(worlds, dtype, tolerance):
    worlds.run(2, cases.served, dtype, tolerance)


def test_plans_come_from_folders(worlds, tmp_path):
    plan = random_plan(1, tables_of(Model("meta")), 2)
    plan = replace(plan, topology=Topology.load("cpu:2"), profile="made for this test")
    plan.save(tmp_path / "plan")
    worlds.run(2, cases.from_folder, tmp_path / "plan")


def test_equal_runs_give_equal_bits(worlds):
    worlds.run(2, cases.deterministic)


def test_fused_parameters_train_as_the_unsharded_model(worlds):
    worlds.run(2, cases.fused)


def test_compiled_models_train_as_eager_ones(worlds):
    worlds.run(2, cases.compiled, "aot_eager")


@pytest.mark.slow
def test_inductor(worlds):
    worlds.run(2, cases.compiled, "inductor")


def test_outputs_are_the_unsharded_modules(worlds):
    worlds.run(2, cases.outputs)


def test_collections_take_their_parts_of_the_memory(worlds):
    worlds.run(2, cases.memory_of_parts)


def test_ranks_with_unlike_models(worlds):
    worlds.run(2, cases.unlike_models)


def test_a_failure_in_one_collection_is_told_in_the_others(worlds):
    worlds.run(2, cases.told_by_another_collection)


def test_gradients_are_summed_where_torchrec_does_not_divide(worlds):
    worlds.run(2, cases.undivided)


def test_weights_of_a_batch_are_for_weighted_collections(worlds):
    worlds.run(2, cases.unweighted)


def test_groups_without_the_first_rank(worlds):
    worlds.run(2, cases.second_of_two)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_virtual_table", True),
        ("enable_embedding_update", True),
        ("num_embeddings_post_pruning", 10),
    ],
)
def test_configs_that_no_row_of_ours_can_give(setting: str, value: Any, monkeypatch):
    model = Model("meta")
    plan = random_plan(0, tables_of(model), 1)
    monkeypatch.setattr(model.bags.embedding_bag_configs()[0], setting, value, raising=False)
    with pytest.raises(OperError, match=f"'wide': its config sets {setting}"):
        oper.torchrec_plan(plan, model)


def test_two_dimensional_parallelism_is_refused():
    model = Model("meta")
    sharder = oper.OperEmbeddingBagCollectionSharder(random_plan(0, tables_of(model), 1))
    with pytest.raises(OperError, match="2D parallelism"):
        sharder.shard(model.bags, {}, Mock(spec=ShardingEnv2D))


def test_plans_for_several_ranks_need_a_process_group():
    model = Model("meta")
    with pytest.raises(OperError, match=r"1 is running without a process group; .*init_process_gr"):
        oper.shard(model, random_plan(0, tables_of(model), 2))
