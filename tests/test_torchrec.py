"""OPER in a TorchRec script, against the unsharded model and against TorchRec itself."""

import pytest

from tests import torchrec_cases as cases
from tests.ranks import RankFailedError

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
def test_a_script_trains_as_the_unsharded_model(two_ranks, kind, copies):
    moved = two_ranks.run(2, cases.train_and_compare, kind, copies)
    assert min(moved) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("copies", [NO_COPIES, SOME_COPIES, ALL_COPIES])
def test_a_script_trains_on_other_numbers_of_ranks(four_ranks, ranks, kind, copies):
    four_ranks.run(ranks, cases.train_and_compare, kind, copies)


@pytest.mark.parametrize("mutant", ["no update", "no division", "wrong exchange", "two updates"])
def test_the_comparison_catches_mutants(two_ranks, mutant):
    with pytest.raises(RankFailedError, match="not close"):
        two_ranks.run(2, cases.train_and_compare, "sgd", NO_COPIES, mutant)


PIPELINES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


@pytest.mark.parametrize("name", [*PIPELINES, "EvalPipelineSparseDist"])
def test_pipelines(two_ranks, name):
    two_ranks.run(2, cases.pipelined, name)


def test_state_dicts_may_be_written_in_place(two_ranks):
    for warnings in two_ranks.run(2, cases.written_in_place):
        assert len(warnings) == 1
        assert "'wide': a state dict was written to after" in warnings[0]


def test_state_dicts_of_others_are_loaded(two_ranks):
    two_ranks.run(2, cases.loaded)


def test_initial_rows_depend_on_neither_plan_nor_ranks(two_ranks):
    first, *others = [
        *two_ranks.run(2, cases.initial, NO_COPIES),
        *two_ranks.run(2, cases.initial, ALL_COPIES),
        *two_ranks.run(1, cases.initial, NO_COPIES),
    ]
    for other in others:
        cases.compare(other, first, 0)


def test_a_model_with_weights_keeps_rank_zeros(two_ranks):
    two_ranks.run(2, cases.rank_zeros_weights)


def test_learning_rates_are_scheduled(two_ranks):
    two_ranks.run(2, cases.scheduled)
