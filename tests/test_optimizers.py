"""The update of rows against its definition in torch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.runtime.optimizers import Optimizer, update_rows


@given(
    seed=st.integers(0, 2**32 - 1),
    lists=st.integers(0, 5),
    slots=st.sampled_from([1, 2, 50, 3000]),
    dim=st.sampled_from([1, 4, 17, 64]),
    weight_decay=st.sampled_from([0.0, 0.3]),
)
def test_sgd(seed, lists, slots, dim, weight_decay):
    generator = torch.Generator().manual_seed(seed)
    optimizer = Optimizer("sgd", weight_decay=weight_decay)
    arena = torch.randn(slots, dim, generator=generator)
    expected = arena.clone()
    state = torch.empty(slots, 0, dtype=torch.uint8)
    for step in range(1, 4):
        touched = [torch.rand(slots, generator=generator) < 0.4 for _ in range(lists)]
        ids = [mask.nonzero().flatten() for mask in touched]
        grads = [torch.randn(len(i), dim, generator=generator) for i in ids]
        total = torch.zeros(slots, dim)
        for i, grad in zip(ids, grads, strict=True):
            total[i] += grad
        rows = torch.cat([*ids, torch.empty(0, dtype=torch.int64)]).unique()
        count = update_rows(
            optimizer, ids, grads, arena.view(torch.uint8), state, dim, torch.float32, 2.0, step
        )
        assert count == len(rows)
        expected[rows] -= 2.0 * (total[rows] + weight_decay * expected[rows])
        torch.testing.assert_close(arena, expected, rtol=1e-5, atol=1e-5)
