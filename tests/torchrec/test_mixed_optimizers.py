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


# Every two of the seven are in one of these (the lines of the Fano plane).
KINDS = ["none", *OPTIMIZERS]
TRIOS = [tuple(KINDS[(n + step) % 7] for step in (0, 1, 3)) for n in range(7)]


def of_trio(a: str, b: str, c: str) -> dict[str, str]:
    """Three optimizers: any two of them on bags of unlike dims, b and c on bags of like dims, a and
    b on sequences."""
    bags = {"wide": a, "mean": b, "tiny": c, "other": c}
    return bags | {"weighted": c, "seen": a, "sorts": b}


def of_two_pairs(first: tuple[str, str], second: tuple[str, str]) -> dict[str, str]:
    """Two optimizers on bags of like and unlike dims, two on sequences, which are of like dims."""
    bags = {"wide": first[1], "mean": first[0], "tiny": first[0], "other": first[1]}
    return bags | {"weighted": first[0], "seen": second[0], "sorts": second[1]}


_ENDS = [(a, c) for a, _, c in TRIOS]
MIXES = [of_trio(*trio) for trio in TRIOS]
MIXES += [of_two_pairs(_ENDS[n], _ENDS[(n + 1) % 7]) for n in (0, 2, 4, 6)]


def test_every_two_optimizers_are_mixed_on_like_and_unlike_dims() -> None:
    every_two = {frozenset(two) for two in combinations(KINDS, 2)}
    like = [("mean", "other"), ("seen", "sorts")]
    unlike = [two for two in combinations(("wide", "mean", "tiny", "other"), 2) if two != like[0]]
    for tables in (like, unlike):
        assert {frozenset((mix[x], mix[y])) for mix in MIXES for x, y in tables} >= every_two


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(dict.fromkeys(mix.values())))
def test_a_step_and_a_load_after_a_state_dict(worlds, mix):
    worlds.run(2, cases.interrupted, mix, SOME_COPIES)


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
