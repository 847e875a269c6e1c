"""The update of rows against its definition in torch, which is checked against torch.optim, and
against FBGEMM's optimizers on CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.runtime.memory.device import Cpu
from oper.runtime.tables.optimizers import STATES, Optimizer, update_rows
from oper.runtime.tables.row_gradients import RowGradients
from oper.tables.table import Table

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LR = 2.0
STEPS = 3
ADAM: dict[str, Any] = {"eps": 0.1, "betas": (0.6, 0.8)}
OPTIMIZERS = [
    Optimizer("sgd"),
    Optimizer("sgd", weight_decay=0.3),
    Optimizer("momentum_sgd", momentum=0.7),
    Optimizer("momentum_sgd", momentum=0.7, weight_decay=0.3),
    Optimizer("adagrad", eps=0.1),
    Optimizer("adagrad", eps=0.1, weight_decay=0.3),
    Optimizer("rowwise_adagrad", eps=0.1),
    Optimizer("rowwise_adagrad", eps=0.1, weight_decay=0.3),
    Optimizer("rowwise_adagrad", eps=0.1, weight_decay=0.3, decoupled=True),
    Optimizer("adam", **ADAM),
    Optimizer("adam", **ADAM, weight_decay=0.1, decoupled=True),
    Optimizer("partial_rowwise_adam", **ADAM),
    Optimizer("partial_rowwise_adam", **ADAM, weight_decay=0.1, decoupled=True),
]


def step_of(o, w, state, g, t):
    """Rows [n, D] and the parts of their state after step t with gradients g, all in float64."""
    if not o.decoupled:
        g = g + o.weight_decay * w
    decayed = LR * o.weight_decay * w if o.decoupled else 0
    rowwise = o.kind in ("rowwise_adagrad", "partial_rowwise_adam")
    square = g.square().mean(1, keepdim=True) if rowwise else g.square()
    if o.kind == "sgd":
        return w - LR * g, []
    if o.kind == "momentum_sgd":
        m = o.momentum * state[0] + g
        return w - LR * m, [m]
    if o.kind in ("adagrad", "rowwise_adagrad"):
        m = state[0] + square
        return w - LR * g / (m.sqrt() + o.eps) - decayed, [m]
    b1, b2 = o.betas
    m, v = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * square
    m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
    return w - LR * m_hat / (v_hat.sqrt() + o.eps) - decayed, [m, v]


class Reference:
    """A table in float64, of which each step updates the rows that were accessed."""

    def __init__(self, optimizer, values):
        self.optimizer = optimizer
        self.values = values.double()
        rows, dim = values.shape
        self.state = [torch.zeros(rows, s.values(dim)).double() for s in optimizer.states]

    def update(self, ids, grads, step):
        total = torch.zeros_like(self.values)
        for slots, gradients in zip(ids, grads, strict=True):
            total[slots] += gradients.double()
        rows = torch.cat([*ids, torch.empty(0, dtype=torch.int64)]).unique()
        before = [part[rows] for part in self.state]
        after, state = step_of(self.optimizer, self.values[rows], before, total[rows], step)
        self.values[rows] = after
        for part, new in zip(self.state, state, strict=True):
            part[rows] = new
        return len(rows)


class Arena:
    """Rows and state of one rank; a slot has room for more state than the optimizer takes."""

    def __init__(self, optimizer, values):
        self.optimizer = optimizer
        self.values = values.clone()
        spare = 4
        width = optimizer.state_bytes(values.shape[1]) + spare
        self.bytes = torch.zeros(len(values), width, dtype=torch.uint8)
        self.marks = torch.zeros(len(values), dtype=torch.bool)

    def update(self, ids, grads, step):
        rows, dim = self.values.view(torch.uint8), self.values.shape[1]
        dtype = DTYPES[self.values.dtype]
        parts = list(map(RowGradients.of_rows, ids, grads))
        updated = torch.zeros(1, dtype=torch.int64)
        of = (rows, self.bytes, dim, dtype, LR, step)
        update_rows(self.optimizer, parts, [0] * len(parts), *of, updated, Cpu(), self.marks)
        return int(updated)

    @property
    def state(self):
        slices = self.optimizer.state_slices(self.values.shape[1])
        return [self.bytes.view(torch.float32)[:, where] for where in slices.values()]


def draw_values(generator, rows, dim):
    return torch.randn(rows, dim, generator=generator)


def draw_step(generator, rows, dim, lists, share=0.4):
    """Slots and gradients of each rank."""
    ids = [(torch.rand(rows, generator=generator) < share).nonzero()[:, 0] for _ in range(lists)]
    return ids, [torch.randn(len(i), dim, generator=generator) for i in ids]


def assert_alike(table, reference, dtype=torch.float32):
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    close: dict[str, Any] = {"rtol": rtol, "atol": 10 * rtol, "check_dtype": False}
    torch.testing.assert_close(table.values, reference.values, **close)
    for part, expected in zip(table.state, reference.state, strict=True):
        torch.testing.assert_close(part, expected, **close)


def train(optimizer, update, *, rows=50, dim=20, lists=2, seed=0):
    """An arena trained by `update(arena, ids, grads, step)` for some steps, and its reference."""
    generator = torch.Generator().manual_seed(seed)
    values = draw_values(generator, rows, dim)
    arena, reference = Arena(optimizer, values), Reference(optimizer, values)
    for step in range(1, STEPS + 1):
        ids, grads = draw_step(generator, rows, dim, lists)
        reference.update(ids, grads, step)
        update(arena, ids, grads, step)
    return arena, reference


def torchs(o, weight) -> torch.optim.Optimizer:
    """Torch's optimizer of a kind, with the same settings."""
    common = {"lr": LR, "weight_decay": o.weight_decay}
    if o.kind in ("sgd", "momentum_sgd"):
        momentum = o.momentum if o.kind == "momentum_sgd" else 0.0
        return torch.optim.SGD([weight], momentum=momentum, **common)
    if o.kind in ("adagrad", "rowwise_adagrad"):
        return torch.optim.Adagrad([weight], eps=o.eps, **common)
    return torch.optim.AdamW([weight], eps=o.eps, betas=o.betas, **common)


# Of one dimension, row-wise optimizers are the element-wise ones. Torch's Adagrad does not decouple
# its weight decay.
@pytest.mark.parametrize(
    ("optimizer", "dim"),
    [
        (optimizer, dim)
        for optimizer in OPTIMIZERS
        for dim in ((1,) if "rowwise" in optimizer.kind else (1, 6))
        if not (optimizer.decoupled and optimizer.kind == "rowwise_adagrad")
    ],
    ids=str,
)
def test_reference_is_torchs_where_all_rows_are_accessed(optimizer, dim):
    generator = torch.Generator().manual_seed(0)
    reference = Reference(optimizer, draw_values(generator, 10, dim))
    weight = torch.nn.Parameter(reference.values.clone())
    peer = torchs(optimizer, weight)
    for step in range(1, STEPS + 1):
        ids, grads = draw_step(generator, 10, dim, 1, share=1)
        reference.update(ids, grads, step)
        weight.grad = grads[0].double()
        peer.step()
        torch.testing.assert_close(weight.detach(), reference.values)


@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    seed=st.integers(0, 2**32 - 1),
    lists=st.sampled_from([0, 1, 2, 3, 4, 7, 40]),
    rows=st.sampled_from([1, 2, 63, 500]),
    dim=st.sampled_from([1, 4, 16, 33, 128]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_as_the_reference(optimizer, seed, lists, rows, dim, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = draw_values(generator, rows, dim).to(dtype)
    arena, reference = Arena(optimizer, values), Reference(optimizer, values)
    for step in range(1, STEPS + 1):
        ids, grads = draw_step(generator, rows, dim, lists)
        untouched = torch.ones(rows, dtype=torch.bool)
        for slots in ids:
            untouched[slots] = False
        before, state_before = arena.values[untouched], arena.bytes[untouched]
        assert arena.update(ids, grads, step) == reference.update(ids, grads, step)
        assert torch.equal(arena.values[untouched], before)
        assert torch.equal(arena.bytes[untouched], state_before)
        reference.values = reference.values.to(dtype).double()  # what a step is rounded to
    assert_alike(arena, reference, dtype)
    assert not arena.bytes[:, -4:].any()  # not the optimizer's


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "none"])
def test_mutants_are_caught(kind):
    optimizer = next(o for o in OPTIMIZERS if o.kind == kind)

    def nothing(arena, ids, grads, step):
        pass

    def twice(arena, ids, grads, step):
        arena.update(ids, grads, step)
        arena.update(ids, grads, step)

    def one_by_one(arena, ids, grads, step):
        for slots, gradients in zip(ids, grads, strict=True):
            arena.update([slots], [gradients], step)

    def undivided(arena, ids, grads, step):
        arena.update(ids, [gradients * 2 for gradients in grads], step)

    def uncorrected(arena, ids, grads, step):
        arena.update(ids, grads, 1)

    def right(arena, ids, grads, step):
        arena.update(ids, grads, step)

    mutants = [nothing, twice, undivided]
    mutants += [one_by_one] if optimizer.states else []  # SGD is linear in the gradient
    mutants += [uncorrected] if "adam" in kind else []
    assert_alike(*train(optimizer, right))
    for mutant in mutants:
        with pytest.raises(AssertionError):
            assert_alike(*train(optimizer, mutant))


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "none"])
def test_threads_change_nothing(kind):
    optimizer = next(o for o in OPTIMIZERS if o.kind == kind)

    def by(threads):
        def update(arena, ids, grads, step):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                arena.update(ids, grads, step)
            finally:
                torch.set_num_threads(before)

        return train(optimizer, update, rows=20_000, dim=8, lists=3)[0]

    one, three = by(1), by(3)
    assert torch.equal(one.values, three.values)
    assert torch.equal(one.bytes, three.bytes)


def test_sums_go_in_the_order_of_the_lists():
    arena = Arena(Optimizer("sgd"), torch.zeros(4, 3))
    ids = torch.tensor([1, 3])
    grads = [torch.full((2, 3), value) for value in (1.0, 1e8, -1e8, 1.0, 2.0)]
    arena.update([ids] * 5, grads, 1)
    # ((1 + 1e8) - 1e8) + 1 + 2 in float32, whose values about 1e8 are 8 apart.
    assert arena.values[ids].unique().tolist() == [-LR * 3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_are_rounded_to_the_nearest(dtype):
    values = torch.linspace(-3, 3, 512).view(16, 32).to(dtype)
    arena = Arena(Optimizer("sgd"), values)
    grads = torch.linspace(0, 1e-2, 512).view(16, 32)
    arena.update([torch.arange(16)], [grads], 1)
    assert torch.equal(arena.values, (values.float() - LR * grads).to(dtype))


def random_bits(step, slots, dim):
    """32 bits for each value of rows, int64 [slots, dim]: RowBits, in Python's integers."""
    word, half = (1 << 64) - 1, (1 << 32) - 1

    def mix(w):
        w = (w ^ w >> 30) * 0xBF58476D1CE4E5B9 & word
        w = (w ^ w >> 27) * 0x94D049BB133111EB & word
        return w ^ w >> 31

    def of_value(row, d):
        w = (row & half) + d * 0x9E3779B9 & half
        w = (w ^ w >> 16) * 0x21F0AAAD & half
        w = (w ^ w >> 15 ^ row >> 32) * 0x735A2D97 & half
        return w ^ w >> 15

    rows = [mix(mix(step) + slot & word) for slot in slots]
    return torch.tensor([[of_value(row, d) for d in range(dim)] for row in rows])


def neighbours(values, dtype):
    """Of each value, the values of a dtype at it or below, and above, in float64."""
    nearest = values.to(dtype)
    below = torch.where(nearest.double() > values, _next(nearest, -torch.inf), nearest)
    return below.double(), _next(below, torch.inf).double()


def _next(values, to):
    return torch.nextafter(values, torch.tensor(to, dtype=values.dtype))


def rounded_by(bits, values, dtype):
    """Values rounded by random bits: towards zero, or away from it where the bits are less than
    what is left, in units of the last place; of a normal value the bits are as many as are dropped.
    """
    magnitude, bits = values.double().abs(), bits.double()
    low, high = neighbours(magnitude, dtype)
    left = (magnitude - low) / (high - low)
    if dtype == torch.bfloat16:
        up = bits % 2**16 >= 2**16 * (1 - left)
    else:
        normal = magnitude >= 2.0**-14
        up = torch.where(
            normal, bits % 2**13 >= 2**13 * (1 - left), (bits / 2**8).floor() < 2**24 * left
        )
    return torch.where(up & (left > 0), high, low) * values.sign()


def rounded(values, dtype, step):
    """What rows become whose unrounded values after a step are these."""
    zeros = torch.zeros(values.shape, dtype=dtype)
    arena = Arena(Optimizer("sgd", stochastic_rounding=True), zeros)
    arena.update([torch.arange(len(values))], [values / -LR], step)
    return arena.values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(seed=st.integers(0, 2**32 - 1), step=st.integers(1, 2**40))
def test_stochastic_rounding_is_its_definition(dtype, seed, step):
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-30, 16, (9, 13), generator=generator)
    values = draw_values(generator, 9, 13).sign() * 2.0**exponent
    values *= 1 + torch.rand(9, 13, generator=generator)
    values[0, :3] = torch.tensor([0.0, 1.5, -(2.0**-24)])  # which both types have
    found = rounded(values, dtype, step).double()
    assert torch.equal(found, rounded_by(random_bits(step, range(9), 13), values, dtype))


# Slots that are equal in the low bits of 16, 20 and 21, and the last of the arena.
FAR_SLOTS = [3, 2**16 - 1, 2**16, 2**16 + 3, 2**17 + 3, 2**20 + 3, 2**21 + 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_bits_are_of_the_whole_slot(dtype):
    generator = torch.Generator().manual_seed(4)
    values = draw_values(generator, len(FAR_SLOTS), 5)
    zeros = torch.zeros(FAR_SLOTS[-1] + 1, 5, dtype=dtype)
    arena = Arena(Optimizer("sgd", stochastic_rounding=True), zeros)
    arena.update([torch.tensor(FAR_SLOTS)], [values / -LR], 7)
    expected = rounded_by(random_bits(7, FAR_SLOTS, 5), values, dtype)
    assert torch.equal(arena.values[FAR_SLOTS].double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_not_finite_stays_so(dtype):
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e38, -0.0]])
    found = rounded(values, dtype, 1)[0]
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert found[2].isnan()
    assert found[3] == (torch.inf if dtype == torch.float16 else found[3])
    assert found[4] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_the_expected_row_is_the_unrounded_one(dtype, scale):
    """Means over steps, rows and places in a row, each within five deviations of theirs."""
    generator = torch.Generator().manual_seed(3)
    rows, dim, steps = 128, 32, 256
    values = draw_values(generator, rows, dim) * scale
    low, high = neighbours(values.double(), dtype)
    share = (values - low) / (high - low)
    chosen = torch.stack([rounded(values, dtype, step) for step in range(1, steps + 1)])
    up = (chosen.double() - low) / (high - low)
    assert ((up == 0) | (up == 1)).all()
    error, variance = up - share, share * (1 - share)
    for over in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        deviation = variance.expand_as(error).sum(over).sqrt()
        assert (error.sum(over).abs() <= 5 * deviation + 1e-3).all(), over
    # Steps and neighbours of a value are rounded by bits that do not depend on each other.
    normed = error / variance.clamp(min=0.01).sqrt()
    for one, other in (
        (normed[1:], normed[:-1]),
        (normed[:, 1:], normed[:, :-1]),
        (normed[:, :, 1:], normed[:, :, :-1]),
    ):
        assert abs((one * other).mean()) <= 5 / one.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_too_small_for_a_row_add_up(dtype):
    """Each is a twentieth of the distance to the next value: rounded to the nearest, rows stay."""
    unit = float(torch.finfo(dtype).eps)
    grads, steps = torch.full((64, 32), -unit / 20 / LR), 200
    found = {}
    for rounding in (False, True):
        arena = Arena(
            Optimizer("sgd", stochastic_rounding=rounding), torch.ones(64, 32, dtype=dtype)
        )
        for step in range(1, steps + 1):
            arena.update([torch.arange(64)], [grads], step)
        found[rounding] = arena.values.double()
    assert (found[False] == 1).all()
    # A value takes one unit with a chance of 1/20 in each step: 10 in 200, 3.1 the deviation.
    moved = (found[True] - 1) / unit
    deviation = (steps * 0.05 * 0.95) ** 0.5
    assert abs(moved.mean() - steps / 20) < 5 * deviation / moved.numel() ** 0.5
    assert abs(moved.std() / deviation - 1) < 0.1


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "none"])
def test_stochastic_rounding_changes_nothing_but_rounding(kind):
    """Rows in fp32 are the same, and so is the state that one step makes of rows in bf16."""
    optimizer = next(o for o in OPTIMIZERS if o.kind == kind)
    random = replace(optimizer, stochastic_rounding=True)
    generator = torch.Generator().manual_seed(1)
    ids, grads = draw_step(generator, 30, 20, 2)
    for dtype in DTYPES:
        values = draw_values(generator, 30, 20).to(dtype)
        nearest, chosen = Arena(optimizer, values), Arena(random, values)
        for arena in (nearest, chosen):
            arena.update(ids, grads, 1)
        assert torch.equal(nearest.bytes, chosen.bytes)
        assert torch.equal(nearest.values, chosen.values) == (dtype == torch.float32)
        if dtype != torch.float32:
            unit = nearest.values.double().abs() * torch.finfo(dtype).eps
            assert ((nearest.values.double() - chosen.values.double()).abs() <= unit).all()


FBGEMM_CASES = [
    ("EXACT_SGD", {}),
    ("EXACT_ADAGRAD", {}),
    ("EXACT_ROWWISE_ADAGRAD", {}),
    ("EXACT_ROWWISE_ADAGRAD", {"weight_decay": 0.3, "weight_decay_mode": "L2"}),
    ("EXACT_ROWWISE_ADAGRAD", {"weight_decay": 0.3, "weight_decay_mode": "DECOUPLE"}),
]


@pytest.mark.parametrize(("name", "settings"), FBGEMM_CASES)
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_as_fbgemm(name, settings, precision):
    """Two features share the table: of tables of one feature FBGEMM ignores weight decay on CPU."""
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    rows, dim, bags, features = 40, 12, 30, 2
    if "weight_decay_mode" in settings:
        mode = tbe.WeightDecayMode[settings["weight_decay_mode"]]
        settings = settings | {"weight_decay_mode": mode}
    fused = {"optimizer": configs.EmbOptimType[name], "learning_rate": LR, "eps": 0.1} | settings
    place = (tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)
    peer = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place)],
        feature_table_map=[0] * features,
        weights_precision=configs.SparseType[precision],
        **fused,
    )
    generator = torch.Generator().manual_seed(0)
    (weights,) = peer.split_embedding_weights()
    weights.copy_(draw_values(generator, rows, dim))
    arena = Arena(Optimizer.of_fused(fused), weights)
    for step in range(1, STEPS + 1):
        ids = torch.randint(rows, (features * bags,), generator=generator)
        grad = torch.randn(bags, features * dim, generator=generator)
        peer(ids, torch.arange(features * bags + 1)).backward(grad)
        of_ids = grad.view(bags, features, dim).transpose(0, 1).reshape(-1, dim)
        slots, place_of = ids.unique(return_inverse=True)
        grads = torch.zeros(len(slots), dim).index_add_(0, place_of, of_ids)
        arena.update([slots], [grads], step)
    # FBGEMM rounds what it subtracts to fp16 as well: a unit in the last place a step.
    rtol = 1e-5 if precision == "FP32" else STEPS * 2**-10
    torch.testing.assert_close(arena.values, weights, rtol=rtol, atol=rtol)
    for part, (expected,) in zip(arena.state, peer.split_optimizer_states(), strict=True):
        torch.testing.assert_close(part.view(expected.shape), expected)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("dim", [1, 64])
def test_state_is_what_plans_count(kind, dim):
    table = Table("t", 1, dim=dim, optimizer=kind)
    optimizer = Optimizer(kind)
    assert optimizer.state_bytes(dim) == table.memory_bytes("training") - table.row_bytes
    ends = [where.stop for where in optimizer.state_slices(dim).values()]
    assert optimizer.state_bytes(dim) == 4 * max(ends, default=0)


def test_bad_lists_change_nothing():
    arena = Arena(Optimizer("sgd"), torch.zeros(10, 2))
    good, grad = torch.tensor([1, 2]), torch.ones(2, 2)
    for bad, error in [
        ([2, 1], ValueError),
        ([3, 3], ValueError),
        ([-1, 3], IndexError),
        ([3, 10], IndexError),
    ]:
        with pytest.raises(error, match="slots"):
            arena.update([good, torch.tensor(bad)], [grad, grad], 1)
    with pytest.raises(ValueError, match="groups: 4 values from 0 on, of 2"):
        arena.update([good], [torch.ones(1, 2)], 1)
    with pytest.raises(TypeError, match="values"):
        arena.update([good], [grad.double()], 1)
    assert not arena.values.any()


def test_arenas_too_small_are_refused():
    rows, few = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
    adam, none = Optimizer("adam"), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="state: 4 bytes a slot, and adam needs 16"):
        update_rows(adam, [], [], rows, few, 2, "fp32", 0.1, 1, none, Cpu())
    with pytest.raises(ValueError, match="too few for 3 values"):
        update_rows(Optimizer("sgd"), [], [], rows, few, 3, "fp32", 0.1, 1, none, Cpu())


def test_rows_that_are_updated_are_marked():
    generator = torch.Generator().manual_seed(0)
    arena = Arena(Optimizer("adam"), draw_values(generator, 5000, 8))
    expected = torch.zeros(5000, dtype=torch.bool)
    for step in (1, 2):
        ids, grads = draw_step(generator, 5000, 8, 3, 0.1)
        arena.update(ids, grads, step)
        expected[torch.cat(ids)] = True
    assert torch.equal(arena.marks, expected)
    arena.marks = expected[:-1]
    with pytest.raises(ValueError, match=r"marks: expected 5000, one per slot, got \[4999\]"):
        arena.update(ids, grads, 3)
    arena.marks = expected.to(torch.uint8)
    with pytest.raises(TypeError, match="marks: expected a contiguous bool tensor"):
        arena.update(ids, grads, 3)


def test_schema_says_what_is_written():
    schema = str(native.ops().update_rows.default._schema)
    assert "Tensor(d!)? marks" in schema
    assert "Tensor(a!) rows, Tensor(b!) state" in schema
    assert "Tensor(c!) updated" in schema
