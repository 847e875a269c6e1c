"""OPER in a TorchRec script, against the unsharded model and against TorchRec itself."""

import pytest

from tests.support.runtime.ranks import RankFailedError
from tests.support.torchrec import refusal_cases as refusals
from tests.support.torchrec import training_cases as cases

# The share of rows that have copies on all ranks.
NO_COPIES, SOME_COPIES, ALL_COPIES = 0.0, 0.3, 1.0


@pytest.mark.parametrize(
    ("kind", "copies"),
    [
        ("sgd", NO_COPIES),
        ("sgd", ALL_COPIES),
        ("adagrad", SOME_COPIES),
        ("rowwise_adagrad", SOME_COPIES),
        ("adam", SOME_COPIES),
    ],
)
def test_a_script_trains_as_the_unsharded_model(worlds, kind, copies):
    moved = worlds.run(2, cases.train_and_compare, kind, copies)
    assert min(moved) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("copies", [NO_COPIES, SOME_COPIES, ALL_COPIES])
def test_a_script_trains_on_other_numbers_of_ranks(worlds, ranks, kind, copies):
    worlds.run(ranks, cases.train_and_compare, kind, copies)


@pytest.mark.parametrize("mutant", ["no update", "no division", "wrong exchange", "two updates"])
def test_the_comparison_catches_mutants(worlds, mutant):
    with pytest.raises(RankFailedError, match="not close"):
        worlds.run(2, cases.train_and_compare, "sgd", NO_COPIES, mutant)


PIPELINES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


@pytest.mark.parametrize("name", [*PIPELINES, "EvalPipelineSparseDist"])
def test_pipelines(worlds, name):
    worlds.run(2, cases.pipelined, name)


@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", "EvalPipelineSparseDist"])
def test_pipelines_between_nodes(worlds, name):
    worlds.run(3, cases.pipelined, name, nodes=(0, 0, 1), fetch="distinct")


@pytest.mark.parametrize("start_batch", [0, 2])
def test_the_semi_synchronous_pipeline(worlds, start_batch):
    worlds.run(2, cases.semi_synchronous, start_batch)


def test_learning_rates_are_scheduled(worlds):
    worlds.run(2, cases.scheduled)


def test_the_planner_plans_for_all_ranks(worlds):
    worlds.run(2, cases.planned_together)


def test_gradients_accumulate(worlds):
    worlds.run(2, cases.accumulated)


def test_parameters_are_torchrecs(worlds):
    worlds.run(2, cases.parameters)


def test_frozen_tables_stay(worlds):
    worlds.run(2, cases.frozen)


def test_what_is_not_supported_is_refused(worlds):
    worlds.run(2, refusals.refused)


def test_plans_for_other_ranks_and_modes_are_refused(worlds):
    worlds.run(2, refusals.refused_plans)


def test_ids_out_of_range(worlds):
    worlds.run(2, refusals.ids_out_of_range)


def test_counters_by_module(worlds):
    worlds.run(2, cases.counted)


def test_dictionaries_of_tensors_are_batches_too(worlds):
    worlds.run(2, cases.tensor_dict)


def test_rows_go_with_the_model(worlds):
    worlds.run(2, cases.freed)


def test_one_process_needs_no_group():
    cases.alone()


def test_ranks_with_losses_of_different_collections_are_told_which(worlds):
    told = worlds.run(3, cases.losses_of_different_collections, new_group=True)
    for text in told:
        assert "all ranks wait, and not for the same" in text
        assert "(step 1) in the collection of table 'wide'; rank 1 for" in text
        assert "(step 1) in the collection of table 'seen'; rank 2 for" in text
