"""The scan of all rows, their classes, and the holder sets and codes of listed ones, each against
plain Python."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.arrays import as_int64, as_tensor
from oper.cost.workload import Workload
from oper.plan.row_codes import pack_codes
from oper.planner.row_placement.arena_layout import assign_rows
from oper.planner.row_placement.list_hot_rows import (
    StripeOrders,
    make_cuts,
    scan_by_cuts,
    scan_marked,
)
from oper.planner.row_placement.striping import Stripes
from tests.support.planner.instances import make_classes

ROWS_PER_LINE = 448
TABLE_ROWS = st.lists(st.integers(1, 1000), min_size=1, max_size=3)


def marks_of(bitmap, line_offset, rows):
    """The bits of all tables' rows, from the words of the bitmap."""
    marks = []
    for t, n in enumerate(rows):
        words = bitmap[line_offset[t] : line_offset[t + 1], 1:].copy()
        marks.append(np.unpackbits(words.view(np.uint8).ravel(), bitorder="little")[:n])
    return np.concatenate(marks).astype(bool)


def a_profile(rng, rows, bagged, dtype=np.uint32):
    offsets = np.r_[0, np.cumsum(rows)].astype(np.int64)
    accesses = rng.zipf(1.4, offsets[-1]).clip(1, 6000).astype(dtype) - dtype(1)
    samples_with_row = [
        np.minimum(accesses[a:b], rng.integers(1, 5000, b - a).astype(dtype))
        for a, b in pairwise(offsets)
    ]
    kept = [c if bag else c[:0] for c, bag in zip(samples_with_row, bagged, strict=True)]
    return SimpleNamespace(
        tables=rows,
        offsets=offsets,
        accesses=accesses,
        samples_with_row=np.concatenate(kept),
        samples_with_row_offsets=np.r_[0, np.cumsum([len(c) for c in kept])].astype(np.int64),
        all_samples_with_row=np.where(
            np.repeat(bagged, rows), np.concatenate(samples_with_row), accesses
        ).astype(np.int64),
    )


def some_classes(profile):
    """Classes as the scan needs them: one a (accesses, samples with it), and entries per table."""
    keys = np.stack([profile.accesses.astype(np.int64), profile.all_samples_with_row], axis=1)
    classes, class_of_row = np.unique(keys, axis=0, return_inverse=True)
    table = np.repeat(np.arange(len(profile.tables)), np.diff(profile.offsets))
    entries, rows = np.unique(
        np.stack([class_of_row.ravel(), table], axis=1), axis=0, return_counts=True
    )
    return SimpleNamespace(
        rows=np.bincount(class_of_row.ravel(), minlength=len(classes)),
        accesses=classes[:, 0],
        samples_with_row=classes[:, 1],
        D=np.sqrt(classes[:, 1]),
        D_of_node=np.stack([np.cbrt(classes[:, 1]), classes[:, 1] / 7], axis=1),
        expected=_expected(classes[:, 0], classes[:, 1]),
        entry_class=entries[:, 0],
        entry_table=entries[:, 1],
        entry_rows=rows,
    ), class_of_row.ravel()


def _expected(accesses, samples_with_row):
    """Accesses to expect: in proportion, by the samples with a row; of an unread row a share."""
    weight = 1 + 1 / (2.0 + samples_with_row)
    return np.where(samples_with_row > 0, accesses * weight, weight)


def expected_of(profile):
    return _expected(profile.accesses.astype(np.float64), profile.all_samples_with_row)


def stripe_sums(profile, striped, numbered, order, rotation, ranks, value):
    """Σ value of striped rows per table and rank; `numbered` rows take places in the pattern."""
    sums = np.zeros((len(profile.tables), ranks))
    for t in range(len(profile.tables)):
        c = rotation[t]
        for row in range(profile.offsets[t], profile.offsets[t + 1]):
            if striped[row]:
                sums[t, order[c % len(order)]] += value[row]
            c += bool(numbered[row])
    return sums


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=TABLE_ROWS,
    dtype=st.sampled_from([np.uint32, np.uint64]),
    ranks=st.integers(1, 5),
    listed=st.sampled_from(["some", "all", "all but one"]),
)
def test_scan(seed, rows, dtype, ranks, listed):
    rng = np.random.default_rng(seed)
    profile = a_profile(rng, rows, rng.random(len(rows)) < 0.5, dtype)
    classes, class_of_row = some_classes(profile)
    cut = rng.choice([-1, 0, 1, 7, 2**31, 2**62], len(rows))
    quota = rng.integers(0, 40, len(rows))
    if listed != "some":
        # By the cut of some tables, and by the quota of others.
        coldest = profile.accesses == 0
        by_quota = rng.random(len(rows)) < 0.5
        cut = np.where(by_quota, 0, -1)
        quota = np.add.reduceat(coldest, profile.offsets[:-1]).astype(np.int64)
        quota -= (listed == "all but one") & (np.arange(len(rows)) == len(rows) - 1)
        quota = quota.clip(0)
    order = rng.integers(0, ranks, rng.integers(1, 9)).astype(np.uint16)
    rotation = rng.integers(0, len(order), len(rows))
    stripes = [Stripes(order, rotation, np.zeros((len(rows), ranks), np.int64))]

    orders = StripeOrders.of(stripes, np.zeros(len(rows), np.int64))
    found = scan_by_cuts(profile, cut, quota, orders, classes)

    wanted = np.zeros(len(profile.accesses), bool)
    for t in range(len(rows)):
        mine = slice(profile.offsets[t], profile.offsets[t + 1])
        accesses = profile.accesses[mine].astype(np.int64)
        equal = accesses == cut[t]
        wanted[mine] = (accesses > cut[t]) | (equal & (np.cumsum(equal) <= quota[t]))
    assert (marks_of(found.bitmap, found.line_offset, rows) == wanted).all()
    assert (found.listed_accesses == profile.accesses[wanted]).all()
    assert (found.listed_samples_with_row == profile.all_samples_with_row[wanted]).all()
    assert found.listed_accesses.dtype == dtype
    ends = np.r_[0, np.cumsum(wanted)][profile.offsets]
    assert (found.listed_offset == ends).all()
    for value, sums in (
        (np.ones(len(wanted)), found.striped_rows),
        (profile.accesses, found.striped_accesses),
        (expected_of(profile), found.striped_expected),
        (np.sqrt(profile.all_samples_with_row), found.striped_touched),
        (np.cbrt(profile.all_samples_with_row), found.striped_of_nodes[0]),
        (profile.all_samples_with_row / 7, found.striped_of_nodes[1]),
    ):
        expected = stripe_sums(profile, ~wanted, ~wanted, order, rotation, ranks, value)
        np.testing.assert_allclose(sums, expected, rtol=1e-12)
    assert (found.class_of_row == class_of_row[wanted]).all()


def test_headers_count_rows_before_each_line():
    rows = [1000, 1, 5000]
    profile = a_profile(np.random.default_rng(3), rows, [False] * 3)
    marked = native.ops().list_hot_rows(
        as_tensor(profile.accesses),
        as_int64(profile.offsets),
        as_int64(np.array([2, -1, 0])),
        as_int64(np.zeros(3)),
    )
    bitmap, line_offset, _ = (tensor.numpy() for tensor in marked)
    assert line_offset.tolist() == [0, 3, 4, 16]
    marks = np.bitwise_count(bitmap.view(np.uint64)[:, 1:])
    header = bitmap[:, 0].view(np.uint64)
    before = np.r_[0, np.cumsum(marks.sum(axis=1, dtype=np.int64))]
    assert (header & np.uint64(2**37 - 1) == before[:-1]).all()
    for field, words in enumerate((2, 4, 6)):
        part = header >> np.uint64(37 + 9 * field) & np.uint64(511)
        assert (part == marks[:, :words].sum(axis=1)).all()


@given(seed=st.integers(0, 2**32 - 1), rows=TABLE_ROWS, ranks=st.integers(1, 4))
def test_collect_keeps_stripes_in_place_when_rows_leave_them(seed, rows, ranks):
    rng = np.random.default_rng(seed)
    profile = a_profile(rng, rows, [False] * len(rows))
    classes, _ = some_classes(profile)
    mark = native.ops().list_hot_rows
    before = mark(
        as_tensor(profile.accesses),
        as_int64(profile.offsets),
        as_int64(np.full(len(rows), 5)),
        as_int64(np.zeros(len(rows))),
    )
    stripe_bitmap, line_offset = before[0].numpy().view(np.uint64), before[1].numpy()
    bitmap = stripe_bitmap.copy()
    numbered = ~marks_of(bitmap, line_offset, rows)
    # Every third word of the bitmap gets bits that were not there.
    bitmap[:, 1::3] |= rng.integers(0, 2**63, bitmap[:, 1::3].shape).astype(np.uint64)
    for t, n in enumerate(rows):
        line, position = divmod(n, ROWS_PER_LINE)
        if position:
            last = bitmap[line_offset[t] + line, 1:]
            last[-(-position // 64) :] = 0
            if position % 64:
                last[position // 64] &= np.uint64((1 << position % 64) - 1)
    listed_offset = native.ops().number_bitmap(
        as_tensor(bitmap.view(np.int64)), as_int64(line_offset)
    )
    listed = marks_of(bitmap, line_offset, rows)
    order = rng.integers(0, ranks, 5).astype(np.uint16)
    rotation = rng.integers(0, 5, len(rows))
    found = scan_marked(
        profile,
        bitmap,
        stripe_bitmap,
        line_offset,
        listed_offset.numpy(),
        StripeOrders([order], np.zeros(len(rows), np.int64), rotation, ranks),
        classes,
    )
    assert (found.listed_accesses == profile.accesses[listed]).all()
    for value, sums in (
        (np.ones(len(listed)), found.striped_rows),
        (profile.accesses, found.striped_accesses),
        (expected_of(profile), found.striped_expected),
    ):
        expected = stripe_sums(profile, ~listed, numbered, order, rotation, ranks, value)
        assert (sums == expected).all()


@pytest.mark.parametrize("replicas", [0, 1000, 6000])
def test_the_reserve_of_listed_rows_is_of_rows_with_one_owner(replicas):
    workload = Workload("training", "raw", 64)
    classes = make_classes([10, 1], [6000, 100_000], workload, 2)
    copied = np.array([replicas, 0])
    cuts = make_cuts(classes, np.zeros(1, np.int64), copied, copied, 0.0)
    assert (cuts.listed - copied).sum() == 4096
    assert (cuts.listed >= copied).all()


def test_sums_do_not_depend_on_threads():
    profile = a_profile(np.random.default_rng(1), [500_000, 300_000], [False, True])
    classes, _ = some_classes(profile)
    stripes = [Stripes(np.arange(3, dtype=np.uint16), np.array([0, 1]), np.zeros((2, 3), int))]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            zeros = np.zeros(2, np.int64)
            orders = StripeOrders.of(stripes, zeros)
            results.append(scan_by_cuts(profile, zeros + 9, zeros + 1000, orders, classes))
    finally:
        torch.set_num_threads(threads)
    one, three = results
    assert (one.bitmap == three.bitmap).all()
    assert (one.striped_touched == three.striped_touched).all()  # to the last bit


def test_unknown_counters_are_named():
    profile = a_profile(np.random.default_rng(2), [50], [False])
    classes, _ = some_classes(profile)
    zeros = np.zeros(1, np.int64)
    orders = StripeOrders([np.zeros(1, np.uint16)], zeros, zeros, 1)
    found = scan_by_cuts(profile, zeros - 1, zeros, orders, classes)
    unknown = replace(found, listed_accesses=found.listed_accesses + np.uint32(10_000))
    with pytest.raises(ValueError, match="table number 0"):
        _ = unknown.class_of_row


def assigned_by_turns(class_of_row, counts):
    left = counts.copy()
    turn = np.full(len(counts), -1)
    groups = []
    for c in class_of_row:
        g = (turn[c] + 1) % counts.shape[1]
        while left[c, g] == 0:
            g = (g + 1) % counts.shape[1]
        left[c, g] -= 1
        turn[c] = g
        groups.append(g)
    return groups


@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(1, 5), groups=st.integers(1, 6))
def test_rows_of_a_class_go_to_the_groups_by_turns(seed, classes, groups):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, (classes, groups)) * rng.integers(0, 2, (classes, groups))
    class_of_row = rng.permutation(np.repeat(np.arange(classes), counts.sum(axis=1)))
    class_of_row = class_of_row.astype(np.int32)
    found = assign_rows(class_of_row, counts)
    assert found.tolist() == assigned_by_turns(class_of_row, counts)
    label = rng.integers(0, 1000, counts.shape).astype(np.int32)
    assert (assign_rows(class_of_row, counts, label) == label[class_of_row, found]).all()


def test_more_rows_than_counted_are_refused():
    with pytest.raises(ValueError, match="class 0 has more rows"):
        assign_rows(np.zeros(3, np.int32), np.array([[1, 1]]))


@pytest.mark.parametrize(("groups", "dtype"), [(1, np.uint32), (3, np.uint32), (2**31, np.uint64)])
def test_codes_count_each_groups_rows(groups, dtype):
    group = np.array([0, 0, groups - 1, 0, groups - 1], dtype=np.int32)
    if groups == 2**31:
        groups, group = 2**20, np.zeros(5000, np.int32)  # 20 bits and 13 do not fit 32
    codes, rows = pack_codes(group, groups)
    bits = (groups - 1).bit_length()
    assert codes.dtype == dtype
    assert (codes & dtype((1 << bits) - 1) == group).all()
    assert rows.sum() == len(group)
    for g in np.unique(group):
        position = codes[group == g] >> dtype(bits)
        assert position.tolist() == list(range(int(rows[g])))
