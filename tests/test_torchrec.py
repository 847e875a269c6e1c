"""OPER in a TorchRec script, against the unsharded model and against TorchRec itself."""

import pytest

from tests import torchrec_cases as cases
from tests.ranks import RankFailedError, Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as started:
        yield started


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_script_trains_as_the_unsharded_model(ranks, kind):
    moved = ranks.run(2, cases.train_and_compare, kind, 0.0)
    assert min(moved) > 1e-3


@pytest.mark.parametrize("mutant", ["no update", "no division", "wrong exchange", "two updates"])
def test_the_comparison_catches_mutants(ranks, mutant):
    with pytest.raises(RankFailedError, match="not close"):
        ranks.run(2, cases.train_and_compare, "sgd", 0.0, mutant)
