"""oper.graph_step: models of TorchRec's whose steps are captured on devices, bit by bit as on CPU
ranks."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cuda.test_training import same_bits
from tests.support.cuda import captured_models as cases
from tests.support.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.mark.parametrize(("number", "kind"), [(1, "adam"), (2, "rowwise_adagrad")])
def test_trains_as_on_cpu_ranks(ranks: Ranks, library: str | None, number: int, kind: str) -> None:
    found: list[Any] = ranks.run(number, cases.train_captured, kind, library)
    for on_device, on_cpu in found:
        same_bits(on_device["outputs"], on_cpu["outputs"])
        assert on_device["counted"] == on_cpu["counted"]
        assert on_device["model"].keys() == on_cpu["model"].keys()
        for name, value in on_device["model"].items():
            assert torch.equal(value, on_cpu["model"][name]), name
        assert sum(on_device["captured"]) >= 5


@pytest.mark.parametrize("number", [1, 2])
def test_serves_as_on_cpu_ranks(ranks: Ranks, library: str | None, number: int) -> None:
    assert all(ranks.run(number, cases.serve_captured, library))


def test_what_cannot_be_captured_is_told(ranks: Ranks, library: str | None) -> None:
    (said,) = ranks.run(1, cases.told, library)
    for text, wanted in zip(
        said,
        [
            'shard the model with device="cuda:0"',
            "has no collection that OPER sharded",
            "a captured step: expected .* dataclasses of them, got a set",
            "call the batch's length_per_key()",
            "does not require grad",
            "gradients of earlier batches are held back",
            "in an earlier batch: feature .*: id 1000000, number",
            r"the step cannot be captured: .* as \.item\(\)",
            "a captured step: expected .*, got a JaggedTensor",
        ],
        strict=True,
    ):
        assert re.search(wanted, text), (wanted, text)


def test_a_rank_may_capture_its_step_later(ranks: Ranks, library: str | None) -> None:
    ranks.run(2, cases.late_on_one_rank, library)


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_done_outside_of_the_step(ranks: Ranks, library: str | None, number: int) -> None:
    ranks.run(number, cases.updated_outside, library)


def test_steps_are_run_as_they_are_while_rows_move(ranks: Ranks, library: str | None) -> None:
    ranks.run(2, cases.moved_between, library)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as started:
        yield started


# Of eighteen steps, those that are run as graphs.
GRAPHS = {
    "a part in eval": [3, 4, 5, 6, 7],
    "a parameter trained later": [*range(3, 8), *range(15, 18)],
    "a parameter elsewhere": [*range(3, 8), *range(15, 18)],
    "gradients let go": [*range(3, 8), *range(15, 18)],
}


@pytest.mark.parametrize("name", cases.CHANGES)
def test_what_changes_between_steps(alone: Ranks, library: str | None, name: str) -> None:
    (graphs,) = alone.run(1, cases.changed_between, name, library)
    assert graphs == GRAPHS.get(name, [*range(3, 18)])


def test_a_capture_that_fails_leaves_gradients_alone(alone: Ranks, library: str | None) -> None:
    alone.run(1, cases.gradients_after_a_failure, library)
