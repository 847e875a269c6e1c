"""Memory is evened out by the coldest rows, as if ranks gave and took them one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.cost.workload import Workload
from oper.planner.problem.classes import Classes
from oper.planner.row_placement import row_placement
from oper.planner.row_placement.row_placement import even_memory
from oper.planner.row_placement.striping import Stripes, make_stripes
from tests.support.planner.instances import make_classes


def one_by_one(
    counts: Ints, classes: Classes, sets: HolderSets, stripes: list[Stripes], shares: Floats
) -> None:
    """`even_memory` rank by rank."""
    memory = sets.holds.T @ (counts.T @ classes.m)
    for width, made in zip(classes.widths, stripes, strict=True):
        memory += made.rows.sum(axis=0) * float(width.memory_bytes)
    target = memory.sum() * shares / shares.sum()
    for w in classes.widest_first():
        surplus = (memory - target) / classes.widths[w].memory_bytes
        rows = np.floor(surplus + 1e-9).astype(np.int64)
        short = -int(rows.sum())
        if short > 0:
            rows[np.argsort(rows - surplus, kind="stable")[: min(short, len(shares))]] += 1
        if rows.sum() != 0 or not rows.any():
            continue
        moving: list[int] = []
        coldest = np.flatnonzero(classes.width == w)[::-1].tolist()
        for r in np.flatnonzero(rows > 0):
            given = [c for c in coldest for _ in range(int(counts[c, r]))][: rows[r]]
            for c in given:
                counts[c, r] -= 1
            memory[r] -= len(given) * classes.widths[w].memory_bytes
            moving += given
        moving.sort(key=coldest.index)
        for r in np.flatnonzero(rows < 0):
            taken, moving = moving[: -rows[r]], moving[-rows[r] :]
            for c in taken:
                counts[c, r] += 1
            memory[r] += len(taken) * classes.widths[w].memory_bytes


@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_the_coldest_rows_move(ranks: int, kinds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = ((64, 68), (128, 136))
    classes = make_classes(
        rng.integers(0, 40, kinds).tolist(),
        rng.integers(1, 30, kinds).tolist(),
        Workload("inference", "raw", 512),
        ranks,
        widths=widths,
        width=rng.integers(0, 2, kinds).tolist(),
    )
    counts = np.stack(
        [rng.multinomial(n, rng.dirichlet(np.full(ranks, 0.5))) for n in classes.rows]
    )
    shares = rng.uniform(0.5, 1.5, ranks) if seed % 2 else np.full(ranks, 1 / ranks)
    stripes = [make_stripes(shares, rng.integers(0, 90, 3)) for _ in widths]
    expected = counts.copy()
    one_by_one(expected, classes, single_owner_sets(ranks), stripes, shares)
    found = counts.copy()
    few = row_placement._FEW_CLASSES
    row_placement._FEW_CLASSES = 1  # so that more classes have to be looked at
    try:
        even_memory(found, classes, single_owner_sets(ranks), stripes, shares)
    finally:
        row_placement._FEW_CLASSES = few
    assert (found == expected).all()
    np.testing.assert_array_equal(classes.memory_of(found), found.T @ classes.m)
