"""Expected vectors a bag: against all ways in which its ids can lie on nodes, and its bounds."""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.vectors_per_bag import VectorsPerBag
from oper.tables.bag_lengths import BagLengths

Bags = dict[int, int]  # length -> bags


@dataclass(frozen=True)
class Drawn:
    """Bags by their length, and the distinct rows of all."""

    bags: Bags
    distinct: int

    @property
    def new_share(self) -> Fraction:
        """Of the ids after the first of their bag, those of new rows."""
        filled = sum(n for length, n in self.bags.items() if length)
        more = sum(n * length for length, n in self.bags.items()) - filled
        return Fraction(self.distinct - filled, more) if more else Fraction(1)


@st.composite
def drawn_tables(draw: st.DrawFn, longest: int) -> Drawn:
    lengths = st.integers(0, longest)
    bags = draw(st.dictionaries(lengths, st.integers(1, 1000), min_size=1, max_size=8))
    filled = sum(n for length, n in bags.items() if length)
    ids = sum(n * length for length, n in bags.items())
    return Drawn(bags, draw(st.sampled_from([filled, ids]) | st.integers(filled, ids)))


def vectors_of(*tables: Drawn) -> VectorsPerBag:
    pairs = [(t, length, n) for t, drawn in enumerate(tables) for length, n in drawn.bags.items()]
    array = np.array(pairs, dtype=np.int64).reshape(len(pairs), 3)
    return VectorsPerBag(BagLengths.of_pairs(array, np.array([d.distinct for d in tables])))


@given(drawn=drawn_tables(4), weights=st.lists(st.integers(0, 9), min_size=2, max_size=3))
def test_all_ways_of_the_ids(drawn: Drawn, weights: list[int]) -> None:
    """Every way in which the ids of a bag can be new or repeat, and new ones lie on nodes, each by
    its exact chance; the last weight is that of replicas."""
    shares = [Fraction(w, sum(weights)) for w in weights] if any(weights) else [Fraction(0)] * 2
    new_share = drawn.new_share
    expected = [Fraction() for _ in shares[:-1]]
    for length, number in drawn.bags.items():
        for repeats in itertools.product((False, True), repeat=max(length - 1, 0)):
            way = Fraction(number, sum(drawn.bags.values()))
            for repeat in repeats:
                way *= 1 - new_share if repeat else new_share
            new = repeats.count(False) + (length > 0)
            for nodes in itertools.product(range(len(shares)), repeat=new):
                chance = way * math.prod((shares[node] for node in nodes), start=Fraction(1))
                for node in set(nodes) - {len(shares) - 1}:
                    expected[node] += chance
    given = np.array([[float(share) for share in shares[:-1]]])
    np.testing.assert_allclose(
        vectors_of(drawn).chances(given)[0], [float(e) for e in expected], rtol=1e-13, atol=0
    )


@given(
    tables=st.lists(drawn_tables(90), min_size=1, max_size=3),
    share=st.floats(1e-30, 1.0) | st.sampled_from([0.0, 1.0, 1e-12, 1 - 1e-12]),
)
def test_accurate_for_every_share(tables: list[Drawn], share: float) -> None:
    shares = np.full((len(tables), 2), share)
    vectors = vectors_of(*tables)
    chances, slopes, chords = (f(shares) for f in (vectors.chances, vectors.slopes, vectors.chords))
    x = Fraction(share)
    for table, drawn in enumerate(tables):
        # The shares of new rows and of bags are rounded before anything is summed.
        s = Fraction(float(drawn.new_share))
        total = sum(drawn.bags.values())
        exact, slope = Fraction(), Fraction()
        for length, number in drawn.bags.items():
            if length:
                p, later = Fraction(number, total), (1 - s * x) ** (length - 1)
                exact += p * (1 - (1 - x) * later)
                slope += p * later
            if length > 1:
                slope += p * (1 - x) * s * (length - 1) * (1 - s * x) ** (length - 2)
        chord = exact / x if share else slope
        assert chances[table] == pytest.approx([float(exact)] * 2, rel=1e-12, abs=0)
        assert slopes[table] == pytest.approx([float(slope)] * 2, rel=1e-12, abs=1e-13)
        assert chords[table] == pytest.approx([float(chord)] * 2, rel=1e-12, abs=0)


@given(
    drawn=drawn_tables(2000),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted),
)
def test_concave_between_its_linear_bounds(drawn: Drawn, shares: list[float]) -> None:
    vectors = vectors_of(drawn)
    x = np.array([[0.0, *shares, 1.0]])
    chances, slopes, chords = (f(x)[0] for f in (vectors.chances, vectors.slopes, vectors.chords))
    slack = 1e-12
    total = sum(drawn.bags.values())
    assert chances[0] == 0
    assert chances[-1] == pytest.approx(1 - drawn.bags.get(0, 0) / total, rel=slack)
    assert slopes[0] == pytest.approx(drawn.distinct / total, rel=slack)
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
    vectors = vectors_of(Drawn({}, 0), Drawn({0: 7}, 0), Drawn({1: 7}, 7))
    assert vectors.chances(shares).tolist() == [[0, 0], [0, 0], [0.5, 1]]
    assert vectors.slopes(shares).tolist() == [[0, 0], [0, 0], [1, 1]]
    assert vectors.chords(np.zeros((3, 2))).tolist() == [[0, 0], [0, 0], [1, 1]]
