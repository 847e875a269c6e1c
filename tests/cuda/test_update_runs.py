"""Rows updated on devices, emulated, by the threads that sum their gradients: the bits of the
processor's sums and updates, in any order of threads."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.runtime.tables.optimizers import Optimizer
from tests.support.cuda.devices import Device
from tests.support.cuda.gradient_batches import (
    KINDS,
    TORCH_DTYPE,
    Arena,
    Batch,
    assert_equal_arenas,
    optimizers,
)
from tests.support.examples import examples

SLOTS = 2039  # of an arena: a prime
STEPS = 2


def arenas_of(
    batch: Batch, optimizer: Optimizer, dtype: str, spare: tuple[int, int] = (0, 0)
) -> list[Arena]:
    """An arena for each bucket, always the same."""
    random = torch.Generator().manual_seed(3)
    values = [torch.randn(batch.arena, dim, generator=random) for dim in batch.dims]
    return [Arena(optimizer, dtype, of_bucket, spare) for of_bucket in values]


def update_on_the_processor(batch: Batch, arenas: list[Arena]) -> int:
    """Some steps by all groups, one after the other; how many rows were updated."""
    updated = torch.tensor([100])
    slots, sums = batch.slots, batch.on_the_processor()
    for step in range(1, STEPS + 1):
        for group in range(batch.groups.shape[1] - 1):
            arena = arenas[group // batch.codes]
            lists = ([slots], [sums], [batch.groups], [group])
            arguments = arena.arguments(step)
            arguments += [updated, 0, arena.marks]
            native.ops().update_rows(*lists, arena.rows, arena.state, *arguments)
    return int(updated) - 100


def update_on(device: Device, batch: Batch, arenas: list[Arena], order: int) -> int:
    """Some steps by all groups on a device, which sums the gradients itself."""
    updated = device.put(torch.tensor([100]))
    there = [(device.put(arena.rows), device.put(arena.state)) for arena in arenas]
    marks = [device.put(arena.marks) for arena in arenas]
    for step in range(1, STEPS + 1):
        for group in range(batch.groups.shape[1] - 1):
            bucket = group // batch.codes
            given = arguments_on(device, batch, group, there[bucket])
            settings, packed = arenas[bucket].settings_on(device, step)
            given += [*arenas[bucket].arguments(step)[:-1], settings, updated, device.stream]
            given += [batch.means, marks[bucket], packed]
            device.start("update_runs", *given, order=order)
    for arena, (rows, state), marked in zip(arenas, there, marks, strict=True):
        arena.rows, arena.state, arena.marks = rows.cpu(), state.cpu(), marked.cpu()
    return int(updated) - 100


def arguments_on(
    device: Device, batch: Batch, group: int, arena: tuple[torch.Tensor, torch.Tensor]
) -> list[Any]:
    """Those of the operator up to the arena. What lies beyond the runs is anything."""
    runs = (batch.positions, batch.run_start, batch.slots)
    rooms = (batch.accesses, batch.accesses + 1, batch.accesses)
    read: list[torch.Tensor | None] = [batch.grad]
    for tensor, room in zip(runs, rooms, strict=True):
        beyond = torch.full((room - len(tensor),), 2**30, dtype=tensor.dtype)
        read.append(torch.cat([tensor, beyond]))
    read.append(batch.groups[0].contiguous())
    accesses = (batch.offsets, batch.weights, batch.features, batch.segment_offset)
    put = [device.put(tensor) for tensor in read]
    how = [*map(device.put, accesses), batch.scale, batch.by_bag]
    return [*put, group, *how, *arena]


def check(
    device: Device,
    batch: Batch,
    optimizer: Optimizer,
    dtype: str,
    orders: tuple[int, ...],
    spare: tuple[int, int] = (0, 0),
) -> None:
    expected = arenas_of(batch, optimizer, dtype, spare)
    updated = update_on_the_processor(batch, expected)
    assert updated == STEPS * len(batch.slots)
    for order in orders:
        found = arenas_of(batch, optimizer, dtype, spare)
        assert update_on(device, batch, found, order) == updated
        for mine, other in zip(found, expected, strict=True):
            assert_equal_arenas(mine, other)


# Rows of one piece and of many, of no whole number of pieces, and longer than what the threads of a
# warp hold at once; gradients at multiples of 16 bytes and elsewhere.
@pytest.mark.parametrize("dim", [1, 4, 5, 8, 33, 64, 132, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer(device: Device, kind: str, dim: int) -> None:
    for n, dtype in enumerate(TORCH_DTYPE):
        optimizer = Optimizer(
            kind, weight_decay=0.1, decoupled=n == 1, stochastic_rounding=bool(dim % 3)
        )
        batch = Batch(n, [60, 0, 50], [dim], gap=n, slots=60, arena=SLOTS)
        check(device, batch, optimizer, dtype, (n,))


@given(
    optimizer=optimizers,
    dtype=st.sampled_from(list(TORCH_DTYPE)),
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 600), min_size=1, max_size=4),
    dims=st.lists(st.sampled_from([2, 5, 8, 20, 33, 64, 144]), min_size=1, max_size=2),
    slots=st.sampled_from([1, 50, 1500]),
    hot=st.sampled_from([0, 255, 256, 257, 511, 512, 513]),
    gap=st.sampled_from([0, 3, 8]),
    offset_type=st.sampled_from([None, np.int32, np.int64]),
    weighted=st.booleans(),
    means=st.booleans(),
    frozen=st.booleans(),
    spare=st.sampled_from([(0, 0), (16, 0), (4, 4), (8, 12)]),
)
@examples(30)
def test_any_batch(
    device: Device,
    optimizer: Optimizer,
    dtype: str,
    seed: int,
    sizes: list[int],
    hot: int,
    offset_type: type | None,
    weighted: bool,
    spare: tuple[int, int],
    **of_batch: Any,
) -> None:
    by_bag = offset_type is not None and not weighted and bool(seed % 2)
    batch = Batch(
        seed, [sizes[0] + hot, *sizes[1:]], hot=hot, offset_type=offset_type, weighted=weighted,
        by_bag=by_bag, arena=SLOTS, **of_batch,
    )  # fmt: skip
    check(device, batch, optimizer, dtype, (0, seed), spare)


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dim", [5, 16, 144])
def test_rows_read_often_beside_others(device: Device, dim: int, kind: str) -> None:
    """More rows than threads hold at once, and some of many pieces among them."""
    batch = Batch(1, [8000, 4000], [dim], ranks=1, slots=10**9, hot=3000, arena=16381)
    assert batch.run_start.diff().max() >= 3000
    assert len(batch.slots) > 1500
    check(device, batch, Optimizer(kind), "fp32", device.orders)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_beyond_16_bits_of_slots_are_rounded_alike(device: Device, dtype: str) -> None:
    batch = Batch(5, [200], [5], ranks=1, slots=10**9, arena=2**17 - 1)
    assert (batch.slots >= 2**16).any()
    check(device, batch, Optimizer("sgd", stochastic_rounding=True), dtype, (1,))


def test_slots_that_are_not_the_arenas_are_left_alone(device: Device) -> None:
    batch = Batch(2, [200], [4], ranks=1, slots=60, arena=SLOTS)
    whole, expected = (arenas_of(batch, Optimizer("adagrad"), "fp32") for _ in range(2))
    update_on_the_processor(batch, expected)
    (arena,), (of_all,) = whole, expected
    rows, state = arena.rows, arena.state
    arena.rows, arena.state, arena.marks = rows[:700], state[:700], arena.marks[:700]
    inside = int((batch.slots < 700).sum())
    assert 0 < inside < len(batch.slots)
    assert update_on(device, batch, [arena], 1) == STEPS * inside
    assert torch.equal(arena.rows, of_all.rows[:700])
    assert torch.equal(arena.state, of_all.state[:700])
    assert not state[700:].any()


def test_batches_without_runs(device: Device) -> None:
    """Of a batch without accesses, and of one with a bad id, which has room for runs."""
    for sizes in ([0, 0], [300]):
        batch = Batch(0, sizes, [8], arena=SLOTS)
        batch.groups = torch.zeros_like(batch.groups)
        arenas = arenas_of(batch, Optimizer("sgd"), "fp32")
        before = arenas[0].rows.clone()
        assert update_on(device, batch, arenas, 0) == 0
        assert torch.equal(arenas[0].rows, before)


def test_what_does_not_fit_is_refused(device: Device) -> None:
    batch = Batch(0, [6], [8], arena=SLOTS)
    (arena,) = arenas_of(batch, Optimizer("adam"), "fp32")
    there = (device.put(arena.rows), device.put(arena.state))
    updated = device.put(torch.tensor([0]))
    given = arguments_on(device, batch, 1, there)
    given += [*arena.arguments(1), updated, device.stream]
    wrong: list[tuple[dict[int, Any], type[Exception], str]] = [
        ({0: given[0].double()}, TypeError, "grad: expected dtype .*, got Double"),
        ({0: given[0].half()}, TypeError, "grad: expected dtype .*, got Half"),
        ({1: given[1].long()}, TypeError, "positions"),
        ({3: given[3].int()}, TypeError, "run_slot"),
        ({4: given[4].int()}, TypeError, "before"),
        ({5: 3}, IndexError, "group: 3 is none of 3"),
        ({11: True}, ValueError, "with offsets and without weights alone"),
        ({12: there[0][:, :8].contiguous()}, ValueError, "too few for 8 values"),
        ({13: there[1][:, :8].contiguous()}, ValueError, "adam needs 64"),
        ({16: "lamb"}, ValueError, "lamb is not known"),
    ]
    for change, error, match in wrong:
        changed = [change.get(n, value) for n, value in enumerate(given)]
        with pytest.raises(error, match=match):
            device.start("update_runs", *changed)
