"""Inputs of steps that are captured: what may differ from step to step, and what is copied."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from oper.base.errors import OperError
from oper.torchrec.static_inputs import Inputs, StaticInputs, mapped

Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


def kjt(lengths: list[int], known: bool = False, weighted: bool = False) -> KeyedJaggedTensor:
    values = torch.arange(sum(lengths))
    weights = values.float() if weighted else None
    made = KeyedJaggedTensor(["a", "b"], values, weights, lengths=torch.tensor(lengths))
    if known:
        made.length_per_key()
    return made


def batch(lengths: list[int], value: float = 0.0, **named: Any) -> tuple[Any, ...]:
    dense = torch.full((2, 3), value)
    return (Batch(dense, kjt(lengths, **named)), Pair(dense + 1, {"factor": 2.0}), [None, "text"])


def test_copies_take_the_values_of_later_inputs() -> None:
    first, later = batch([1, 2, 0, 3]), batch([0, 3, 2, 1], 5.0)
    static = StaticInputs(Inputs(first))
    assert static.fit(Inputs(later))
    batches = static.fill(Inputs(later))
    copied, pair, rest = static.arguments
    assert isinstance(pair, Pair)
    assert rest == [None, "text"]
    assert torch.equal(copied.dense, later[0].dense)
    assert torch.equal(pair.one, later[1].one)
    for part in ("values", "lengths", "offsets"):
        assert torch.equal(getattr(copied.sparse, part)(), getattr(later[0].sparse, part)())
    assert batches == {id(copied.sparse): later[0].sparse}
    assert torch.equal(first[0].dense, torch.zeros(2, 3)), "what was given is not written to"


def test_batches_of_offsets_take_the_place_of_those_of_lengths() -> None:
    later = kjt([2, 1, 1, 2], weighted=True)
    by_offsets = KeyedJaggedTensor(
        ["a", "b"], later.values() + 7, later.weights(), offsets=later.offsets(), stride=2
    )
    for given, other in ((kjt([3, 0, 0, 3], weighted=True), by_offsets), (by_offsets, later)):
        static = StaticInputs(Inputs((given,)))
        assert static.fit(Inputs((other,)))
        static.fill(Inputs((other,)))
        (copied,) = static.arguments
        for part in ("values", "weights", "lengths", "offsets"):
            assert torch.equal(getattr(copied, part)(), getattr(other, part)())


@pytest.mark.parametrize(
    "other",
    [
        batch([1, 2, 0, 4]),
        batch([1, 2, 0, 3, 0, 0]),
        batch([1, 2, 0, 3], weighted=True),
        (*batch([1, 2, 0, 3])[:2], [None, "another text"]),
        (*batch([1, 2, 0, 3])[:2], (None, "text")),
        (*batch([1, 2, 0, 3])[:2], [None]),
        batch([1, 2, 0, 3])[:2],
        (batch([1, 2, 0, 3])[0], Pair(torch.zeros(2, 3), {"factor": 3.0}), [None, "text"]),
        (batch([1, 2, 0, 3])[0], Pair(torch.zeros(2, 3), {"other": 2.0}), [None, "text"]),
        (batch([1, 2, 0, 3])[0], Pair(torch.zeros(6), {"factor": 2.0}), [None, "text"]),
        (batch([1, 2, 0, 3])[0], Pair(torch.zeros(2, 3).half(), {"factor": 2.0}), [None, "text"]),
        (batch([1, 2, 0, 3])[0], Pair(3, {"factor": 2.0}), [None, "text"]),
    ],
)
def test_inputs_of_another_shape_do_not_fit(other: tuple[Any, ...]) -> None:
    given = Inputs(batch([1, 2, 0, 3]))
    assert not StaticInputs(given).fit(Inputs(other))
    assert not StaticInputs(Inputs(other)).fit(given)


def test_counts_of_keys_matter_once_somebody_has_asked_for_them() -> None:
    static = StaticInputs(Inputs((kjt([1, 2, 0, 3], known=True),)))
    same = kjt([2, 1, 3, 0], known=True)
    others = [kjt([1, 0, 2, 3], known=True), kjt([1, 2, 0, 3])]
    assert all(static.fit(Inputs((each,))) for each in (same, *others))
    static.arguments[0].length_per_key_or_none()
    assert static.fit(Inputs((same,)))
    assert not any(static.fit(Inputs((each,))) for each in others)


def test_what_cannot_be_captured_is_named() -> None:
    with pytest.raises(OperError, match=r"a captured step: expected .* of them, got a set"):
        Inputs(({1, 2},))
    with pytest.raises(OperError, match=r"a captured step: expected .*, got a object"):
        mapped([object()], lambda leaf: leaf)


@pytest.mark.parametrize("part", ["dense", "values", "weights", "lengths"])
def test_a_tensor_on_another_device_is_named(part: str) -> None:
    """A copy from the host's memory would read it after the caller has put the next batch there."""
    parts = [torch.arange(6), torch.ones(6), torch.tensor([1, 2, 0, 3])]
    names = ["values", "weights", "lengths"]
    there = [p.to("meta") if name == part else p for name, p in zip(names, parts, strict=True)]
    dense = torch.zeros(2, device="meta" if part == "dense" else "cpu")
    sparse = KeyedJaggedTensor(["a", "b"], there[0], there[1], lengths=there[2])
    with pytest.raises(OperError, match="expected a step's inputs on cpu, got a tensor on meta"):
        Inputs((dense, [sparse])).check_on(torch.device("cpu"))
