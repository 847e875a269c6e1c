"""Collections whose tables have different optimizers, or are frozen in part: their checkpoints."""

from itertools import combinations

import pytest

from tests.support.torchrec import checkpoint_cases
from tests.support.torchrec import mixed_optimizer_cases as cases
from tests.support.torchrec.ranks import OPTIMIZERS
from tests.torchrec.test_checkpoints import assert_alike

NO_COPIES, SOME_COPIES, ALL_COPIES = 0.0, 0.3, 1.0  # shares of rows with copies on all ranks

# All six, one table frozen, in one collection of bags and one of sequences.
MIXED = {
    "wide": "momentum_sgd",
    "mean": "adam",
    "tiny": "none",
    "other": "rowwise_adagrad",
    "weighted": "adagrad",
    "seen": "partial_rowwise_adam",
    "sorts": "sgd",
}
# Of those that FBGEMM has on CPUs.
TORCHRECS = dict.fromkeys(MIXED, "adagrad") | {
    "other": "rowwise_adagrad",
    "seen": "rowwise_adagrad",
}


def pair(first: str, second: str) -> dict[str, str]:
    """Two optimizers: in a collection of bags on tables of like dims and of unlike ones, and in one
    of sequences."""
    tables = {"wide": second, "mean": first, "tiny": first, "other": second}
    return tables | {"weighted": first, "seen": first, "sorts": second}


@pytest.mark.parametrize(("first", "second"), [*combinations(["none", *OPTIMIZERS], 2)])
def test_a_step_and_a_load_after_a_state_dict(worlds, first, second):
    worlds.run(2, cases.interrupted, pair(first, second), SOME_COPIES)


@pytest.mark.parametrize("copies", [NO_COPIES, ALL_COPIES])
@pytest.mark.parametrize("nodes", [None, (0, 1)])
def test_with_copies_and_between_nodes(worlds, copies, nodes):
    worlds.run(2, cases.interrupted, MIXED, copies, nodes=nodes)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_on_other_numbers_of_ranks(worlds, ranks):
    worlds.run(ranks, cases.interrupted, MIXED, SOME_COPIES)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_checkpoints_go_to_other_numbers_of_ranks_and_back(worlds, tmp_path, ranks):
    run, two, more = checkpoint_cases.checkpoint, tmp_path / "two", tmp_path / "more"
    saved = worlds.run(2, run, "oper", MIXED, None, two)[0]
    assert_alike(saved, worlds.run(ranks, run, "oper", MIXED, two, more)[0], "oper")
    assert_alike(saved, worlds.run(2, run, "oper", MIXED, more)[0], "oper")


@pytest.mark.parametrize("of_wide", ["adagrad", "sgd"])
def test_checkpoints_go_to_torchrecs_sharding_and_back(worlds, tmp_path, of_wide):
    run, ours, theirs = checkpoint_cases.checkpoint, tmp_path / "ours", tmp_path / "theirs"
    kind = TORCHRECS | {"wide": of_wide, "weighted": of_wide}
    saved = worlds.run(2, run, "oper", kind, None, ours)[0]
    # Of ranks that lack tables of the checkpoint, torch wants keys for SGD's states too, and there
    # are none: so it is where TorchRec loads its own checkpoints.
    partial = of_wide == "sgd"
    there = worlds.run(2, run, "table_wise", kind, ours, theirs, partial=partial)[0]
    assert_alike(saved, there, "oper")
    assert_alike(saved, worlds.run(2, run, "oper", kind, theirs)[0], "oper")


def test_checkpoints_are_loaded_in_place(worlds, tmp_path):
    worlds.run(2, cases.loaded_in_place, MIXED, tmp_path / "saved")


@pytest.mark.parametrize("missing", ["wide", "other", "sorts"])
def test_a_checkpoint_that_lacks_a_tables_state(worlds, tmp_path, missing):
    worlds.run(2, cases.loaded_without, tmp_path / "saved", missing)


def test_a_checkpoint_that_has_more_states(worlds, tmp_path):
    worlds.run(2, cases.loaded_with_more, MIXED, tmp_path / "saved")


def test_states_that_a_table_has_not_are_refused(worlds):
    worlds.run(2, cases.states_of_other_tables)
