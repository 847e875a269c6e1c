"""Models of which parts are sharded by `oper.shard`: names of state dicts, and checkpoints."""

import pytest

from tests.support.torchrec import part_cases as cases

PARTS = pytest.mark.parametrize("parts", ["collections", "towers"])


@PARTS
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_dicts_have_the_unsharded_models_names(worlds, parts, ranks):
    worlds.run(ranks, cases.named_as_unsharded, parts)


@PARTS
def test_missing_and_unexpected_names_are_the_unsharded_models(worlds, parts):
    worlds.run(2, cases.wrong_names, parts)


@PARTS
def test_checkpoints_of_models_with_sharded_parts(worlds, tmp_path, parts):
    worlds.run(2, cases.saved, parts, tmp_path)


def test_parts_that_torchrec_wraps_are_named(worlds, tmp_path):
    worlds.run(2, cases.wrapped_by_torchrec, tmp_path)


def test_distributed_data_parallel_around_sharded_parts(worlds):
    worlds.run(2, cases.data_parallel)
