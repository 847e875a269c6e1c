"""The update of rows on devices, emulated: the bits of the processor's kernel, in any order of
threads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.runtime.tables.kernel_structs import DTYPE_CODE
from oper.runtime.tables.optimizers import Optimizer
from tests.support.cuda import gradient_batches
from tests.support.cuda.devices import Device
from tests.support.cuda.gradient_batches import (
    KINDS,
    LR,
    TORCH_DTYPE,
    assert_equal_arenas,
    optimizers,
)
from tests.support.examples import examples

STEPS = 3
GROUPS, GROUP = 5, 2  # of each list, and the one that is updated
BEYOND = 7  # elements of slots and values behind what the counts name


class Lists:
    """Gradients of one step, as ranks hand them on: in groups of a batch's rows."""

    def __init__(
        self, random: torch.Generator, lists: int, rows: int, dim: int, share: float
    ) -> None:
        self.slots: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.groups: list[torch.Tensor] = []
        for _ in range(lists):
            sizes, before, first = [], [0], []
            slots: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for group in range(GROUPS):
                chosen = (torch.rand(rows, generator=random) < share).nonzero()[:, 0]
                grads = torch.randn(len(chosen), dim, generator=random)
                if group == 1:  # of another bucket, whose end is wherever it is
                    grads = torch.randn(3, generator=random)
                sizes.append(grads.numel())
                if group == GROUP:  # the first of its bucket
                    padding = -sum(v.numel() for v in values) % 16
                    values.append(torch.full((padding,), torch.nan))
                first.append(sum(v.numel() for v in values))
                before.append(before[-1] + len(chosen))
                slots.append(chosen)
                values.append(grads.flatten())
            first.append(first[-1] + sizes[-1])
            slots.append(torch.full((BEYOND,), -1))
            values.append(torch.full((BEYOND,), torch.nan))
            self.slots.append(torch.cat(slots))
            self.values.append(torch.cat(values))
            self.groups.append(torch.tensor([before, first]))

    @property
    def tensors(self) -> tuple[list[torch.Tensor], ...]:
        """What the operator takes of them."""
        return self.slots, self.values, self.groups


class Arena(gradient_batches.Arena):
    def update_on_the_processor(self, lists: Lists, step: int) -> int:
        updated = torch.tensor([100])
        group = [GROUP] * len(lists.slots)
        rest = (*self.arguments(step), updated, 0, self.marks)
        native.ops().update_rows(*lists.tensors, group, self.rows, self.state, *rest)
        return int(updated) - 100

    def update_on(self, device: Device, lists: Lists, step: int, order: int) -> int:
        rows, state = device.put(self.rows), device.put(self.state)
        updated = device.put(torch.tensor([100]))
        given = [[device.put(t) for t in of] for of in lists.tensors]
        group = [GROUP] * len(lists.slots)
        marks = device.put(self.marks)
        settings, packed = self.settings_on(device, step)
        rest = [*self.arguments(step)[:-1], settings, updated, device.stream, marks, packed]
        device.start("update_rows", *given, group, rows, state, *rest, order=order)
        self.rows, self.state, self.marks = rows.cpu(), state.cpu(), marks.cpu()
        return int(updated) - 100


def check(
    device: Device,
    optimizer: Optimizer,
    dtype: str,
    dim: int,
    *,
    seed: int = 0,
    lists: int = 3,
    rows: int = 40,
    share: float = 0.4,
    spare: tuple[int, int] = (0, 0),
    orders: tuple[int, ...] = (),
) -> None:
    """Some steps on the processor and on the device."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=random)
    batches = [Lists(random, lists, rows, dim, share) for _ in range(STEPS)]
    expected = Arena(optimizer, dtype, values, spare)
    counts = [expected.update_on_the_processor(b, n + 1) for n, b in enumerate(batches)]
    for order in orders or device.orders:
        found = Arena(optimizer, dtype, values, spare)
        assert counts == [found.update_on(device, b, n + 1, order) for n, b in enumerate(batches)]
        assert_equal_arenas(found, expected)


# Rows of one piece and of many, of no whole number of pieces, and longer than what the threads of a
# warp hold at once.
@pytest.mark.parametrize("dim", [1, 4, 5, 8, 12, 33, 64, 132, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer(device: Device, kind: str, dim: int) -> None:
    for n, dtype in enumerate(TORCH_DTYPE):
        for lists in (1, 3):
            optimizer = Optimizer(
                kind, weight_decay=0.1, decoupled=n == 1, stochastic_rounding=lists == 3
            )
            check(device, optimizer, dtype, dim, seed=dim, lists=lists, orders=(n,))


@given(
    optimizer=optimizers,
    dtype=st.sampled_from(list(TORCH_DTYPE)),
    dim=st.sampled_from([2, 4, 16, 20, 33, 64, 130, 144]),
    seed=st.integers(0, 2**32 - 1),
    lists=st.sampled_from([1, 2, 4, 9, 72]),
    rows=st.sampled_from([1, 30, 150]),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    spare=st.sampled_from([(0, 0), (16, 0), (4, 4), (8, 12)]),
    order=st.sampled_from([0, 1, 2]),
)
@examples(30)
def test_any_lists(device: Device, rows: int, lists: int, order: int, **given: Any) -> None:
    rows = rows if lists < 9 else min(rows, 30)
    check(device, rows=rows, lists=lists, orders=(order,), **given)


@pytest.mark.parametrize("dim", [4, 64])
@pytest.mark.parametrize("lists", [1, 2])
def test_more_rows_than_threads_at_once(device: Device, lists: int, dim: int) -> None:
    optimizer = Optimizer("rowwise_adagrad")
    check(device, optimizer, "fp32", dim, lists=lists, rows=3000, share=0.9, orders=(1,))


def test_sums_go_in_the_order_of_the_lists(device: Device) -> None:
    arena = Arena(Optimizer("sgd"), "fp32", torch.zeros(4, 4), (0, 0))
    lists = Lists(torch.Generator(), 5, 4, 4, 0.0)
    for n, value in enumerate((1.0, 1e8, -1e8, 1.0, 2.0)):
        lists.slots[n] = torch.tensor([3])
        lists.values[n] = torch.full((4,), value)
        lists.groups[n] = torch.tensor([[0] * (GROUP + 1) + [1] * 3, [0] * (GROUP + 1) + [4] * 3])
    for order in device.orders:
        arena.rows.zero_()
        assert arena.update_on(device, lists, 1, order) == 1
        # ((1 + 1e8) - 1e8) + 1 + 2 in float32, whose values about 1e8 are 8 apart.
        moved = np.float32(LR) * np.float32(3.0)
        assert arena.rows.view(torch.float32)[3].tolist() == [-moved] * 4


@pytest.mark.parametrize("lists", [1, 2])
def test_slots_that_are_not_the_arenas_are_left_alone(device: Device, lists: int) -> None:
    whole = torch.zeros(30, 4)
    arena = Arena(Optimizer("adagrad"), "fp32", whole, (0, 0))
    rows, state = arena.rows, arena.state
    arena.rows, arena.state, arena.marks = rows[10:20], state[10:20], arena.marks[10:20]
    given = Lists(torch.Generator(), lists, 4, 4, 0.0)
    for n in range(lists):
        given.slots[n] = torch.tensor([-(2**62), -1, 0, 9, 10, 2**40])
        given.values[n] = torch.ones(24)
        given.groups[n] = torch.tensor([[0] * (GROUP + 1) + [6] * 3, [0] * (GROUP + 1) + [24] * 3])
    assert arena.update_on(device, given, 1, 1) == 2
    for part in (arena.rows, arena.state):
        assert part.any(1).nonzero()[:, 0].tolist() == [0, 9]
    for part in (rows, state):
        assert not part[:10].any()
        assert not part[20:].any()


def test_nothing_to_do(device: Device) -> None:
    arena = Arena(Optimizer("sgd"), "fp32", torch.ones(3, 4), (0, 0))
    before = arena.rows.clone()
    for lists in (0, 1, 2):
        given = Lists(torch.Generator(), lists, 3, 4, share=0.0)
        assert arena.update_on(device, given, 1, 0) == 0
    assert torch.equal(arena.rows, before)


def test_refused_arguments(device: Device) -> None:
    arena = Arena(Optimizer("adam"), "fp32", torch.ones(10, 4), (0, 0))
    lists = Lists(torch.Generator().manual_seed(0), 2, 10, 4, 0.5)
    slots, values, groups = ([device.put(t) for t in of] for of in lists.tensors)
    rows, state = device.put(arena.rows), device.put(arena.state)
    updated = device.put(torch.tensor([0]))
    given: list[Any] = [slots, values, groups, [GROUP] * 2, rows, state, *arena.arguments(1)]
    given += [updated, device.stream, None, None]
    wrong: list[tuple[dict[int, Any], type[Exception], str]] = [
        ({0: slots[:1]}, ValueError, "got 1, 2, 2 and 2"),
        ({0: [t.int() for t in slots]}, TypeError, "slots"),
        ({1: [t.double() for t in values]}, TypeError, "values"),
        ({2: [t[0] for t in groups]}, ValueError, "groups"),
        ({3: [GROUP, GROUPS]}, IndexError, "group: 5 is none of 5"),
        ({4: rows[:, :8].contiguous()}, ValueError, "too few for 4 values"),
        ({5: state[:, :8].contiguous()}, ValueError, "adam needs 32"),
        ({7: DTYPE_CODE["int8"]}, ValueError, "dtype"),
        ({8: "lamb"}, ValueError, "lamb is not known"),
        ({9: [0.1] * 3}, ValueError, "settings: expected [0-9]+ values, got 3"),
        ({9: [*given[9][:-1], -1.0]}, ValueError, "rounding_step -1 is no number of a step"),
        (
            {13: device.put(torch.zeros(3).long())},
            ValueError,
            "packed: expected the 48 bytes of pack_settings, got 24",
        ),
        ({13: device.put(torch.zeros(6))}, TypeError, "packed"),
        (
            {0: slots * 37, 1: values * 37, 2: groups * 37, 3: [0] * 74},
            ValueError,
            "74 lists, and at most 72",
        ),
    ]
    for change, error, match in wrong:
        changed = [change.get(n, value) for n, value in enumerate(given)]
        with pytest.raises(error, match=match):
            device.start("update_rows", *changed)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_beyond_16_bits_of_slots_are_rounded_alike(device: Device, dtype: str) -> None:
    optimizer = Optimizer("sgd", stochastic_rounding=True)
    check(device, optimizer, dtype, 4, lists=1, rows=2**16 + 500, share=0.01, orders=(1,))


def test_rounding_at_random_is_the_devices_too(device: Device) -> None:
    """And is not what rounding to the nearest gives."""
    optimizer = Optimizer("sgd", stochastic_rounding=True)
    random = torch.Generator().manual_seed(5)
    values = torch.randn(60, 20, generator=random) * 10.0 ** torch.randint(-9, 5, (60, 20))
    lists = Lists(random, 1, 60, 20, 1.0)
    for dtype in ("fp16", "bf16"):
        found, expected, nearest = (
            Arena(o, dtype, values, (0, 0))
            for o in (optimizer, optimizer, replace(optimizer, stochastic_rounding=False))
        )
        found.update_on(device, lists, 7, 2)
        expected.update_on_the_processor(lists, 7)
        nearest.update_on_the_processor(lists, 7)
        assert_equal_arenas(found, expected)
        assert not torch.equal(found.rows, nearest.rows)
