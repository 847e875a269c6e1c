"""Expected vectors a bag: against all ways in which its ids can lie on nodes, and its bounds."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.vectors_per_bag import VectorsPerBag
from oper.tables.bag_lengths import BagLengths

Bags = dict[int, int]  # length -> bags


def vectors_of(*tables: Bags) -> VectorsPerBag:
    pairs = [(t, length, n) for t, bags in enumerate(tables) for length, n in bags.items()]
    array = np.array(pairs, dtype=np.int64).reshape(len(pairs), 3)
    return VectorsPerBag(BagLengths.of_pairs(array, len(tables)))


def exact_chance(bags: Bags, share: float) -> Fraction:
    missed = 1 - Fraction(share)
    total = sum(bags.values())
    return sum(
        (Fraction(n, total) * (1 - missed**length) for length, n in bags.items()), Fraction()
    )


def drawn_bags(longest: int) -> st.SearchStrategy[Bags]:
    return st.dictionaries(st.integers(0, longest), st.integers(1, 1000), min_size=1, max_size=8)


@given(bags=drawn_bags(5), weights=st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_all_ways_of_the_ids(bags: Bags, weights: list[int]) -> None:
    """Every assignment of a bag's ids to nodes, each node the last but one of which holds rows of
    its own, by its exact chance; the last one stands for replicas."""
    total = sum(weights) or 1
    shares = [Fraction(w, total) for w in weights]
    if not any(weights):
        shares[-1] = Fraction(1)
    expected = [Fraction() for _ in shares[:-1]]
    for length, number in bags.items():
        for nodes in itertools.product(range(len(shares)), repeat=length):
            chance = Fraction(number, sum(bags.values()))
            for node in nodes:
                chance *= shares[node]
            for node in set(nodes) - {len(shares) - 1}:
                expected[node] += chance
    given = np.array([[float(share) for share in shares[:-1]]])
    np.testing.assert_allclose(
        vectors_of(bags).chances(given)[0], [float(e) for e in expected], rtol=1e-13, atol=0
    )


@given(
    tables=st.lists(drawn_bags(90), min_size=1, max_size=3),
    share=st.floats(1e-30, 1.0) | st.sampled_from([0.0, 1.0, 1e-12, 1 - 1e-12]),
)
def test_accurate_for_every_share(tables: list[Bags], share: float) -> None:
    shares = np.full((len(tables), 2), share)
    vectors = vectors_of(*tables)
    chances, slopes, chords = (f(shares) for f in (vectors.chances, vectors.slopes, vectors.chords))
    for table, bags in enumerate(tables):
        total, missed = sum(bags.values()), 1 - Fraction(share)
        slope = sum(
            Fraction(n * length, total) * missed ** (length - 1)
            for length, n in bags.items()
            if length
        )
        exact = exact_chance(bags, share)
        assert chances[table] == pytest.approx([float(exact)] * 2, rel=1e-12, abs=0)
        assert slopes[table] == pytest.approx([float(slope)] * 2, rel=1e-12, abs=1e-300)
        chord = exact / Fraction(share) if share else slope
        assert chords[table] == pytest.approx([float(chord)] * 2, rel=1e-12, abs=0)


@given(
    bags=drawn_bags(2000),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted),
)
def test_concave_between_its_linear_bounds(bags: Bags, shares: list[float]) -> None:
    vectors = vectors_of(bags)
    x = np.array([[0.0, *shares, 1.0]])
    chances, slopes, chords = (f(x)[0] for f in (vectors.chances, vectors.slopes, vectors.chords))
    slack = 1e-12
    total = sum(bags.values())
    assert chances[0] == 0
    assert chances[-1] == pytest.approx(1 - bags.get(0, 0) / total, rel=slack)
    assert (np.diff(chances) >= -slack).all()
    assert (np.diff(slopes) <= slack * slopes[0]).all()
    assert (chances >= x[0] * chances[-1] - slack).all()
    assert (chances <= x[0] * slopes[0] * (1 + slack)).all()
    assert (chords <= slopes[0] * (1 + slack)).all()
    assert (chords >= slopes * (1 - slack)).all()
    # Tangents lie above, wherever they touch.
    tangents = chances[:, None] + slopes[:, None] * (x - x.T)
    assert (tangents >= chances - slack * max(slopes[0], 1)).all()


def test_tables_without_bags_or_ids_cost_nothing() -> None:
    shares = np.array([[0.5, 1.0]] * 3)
    vectors = vectors_of({}, {0: 7}, {1: 7})
    assert vectors.chances(shares).tolist() == [[0, 0], [0, 0], [0.5, 1]]
    assert vectors.slopes(shares).tolist() == [[0, 0], [0, 0], [1, 1]]
    assert vectors.chords(np.zeros((3, 2))).tolist() == [[0, 0], [0, 0], [1, 1]]
