"""Max-min fair flows, against filling by hand one resource after the other."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.simulator.flows import Flows, fair_rates


@st.composite
def flows(draw: st.DrawFn) -> Flows:
    """Up to eight flows over some of up to four resources each."""
    bandwidth = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    some = st.sets(st.integers(0, len(bandwidth) - 1), min_size=1)
    used = draw(st.lists(some, min_size=1, max_size=8))
    moved = draw(st.lists(st.integers(1, 20), min_size=len(used), max_size=len(used)))
    table = np.full((len(used), len(bandwidth)), len(bandwidth))
    for f, resources in enumerate(used):
        table[f, : len(resources)] = sorted(resources)
    return Flows(np.array(moved, float), table, np.array(bandwidth, float))


def filled(used: list[set[int]], bandwidth: list[int]) -> list[Fraction]:
    """The rates by the definition: of all resources the one with the least share is full first."""
    rates: dict[int, Fraction] = {}
    left = [Fraction(each) for each in bandwidth]
    while len(rates) < len(used):
        shares = {}
        for r in range(len(left)):
            users = [f for f in range(len(used)) if r in used[f] and f not in rates]
            if users:
                shares[r] = (left[r] / len(users), users)
        share, users = min(shares.values(), key=lambda each: each[0])
        for f in users:
            rates[f] = share
            for r in used[f]:
                left[r] -= share
    return [rates[f] for f in range(len(used))]


def resources_of(given_flows: Flows) -> list[set[int]]:
    none = len(given_flows.bandwidth)
    return [set(row.tolist()) - {none} for row in given_flows.used]


@given(flows())
def test_rates(some: Flows) -> None:
    bandwidth = [int(each) for each in some.bandwidth]
    expected = filled(resources_of(some), bandwidth)
    np.testing.assert_allclose(fair_rates(some.used, some.bandwidth), [float(r) for r in expected])


@given(flows())
def test_seconds(some: Flows) -> None:
    """The end of the last flow, when rates are found anew after each one's end; and no resource
    moves more than it can."""
    used, bandwidth = resources_of(some), [int(each) for each in some.bandwidth]
    left = {f: Fraction(int(size)) for f, size in enumerate(some.bytes)}
    seconds = Fraction(0)
    while left:
        running = sorted(left)
        rates = filled([used[f] for f in running], bandwidth)
        step = min(left[f] / rate for f, rate in zip(running, rates, strict=True))
        seconds += step
        left = {
            f: left[f] - step * rate
            for f, rate in zip(running, rates, strict=True)
            if left[f] > step * rate
        }
    assert some.fair_seconds == pytest.approx(float(seconds))
    for r, each in enumerate(bandwidth):
        through = sum(size for size, of in zip(some.bytes, used, strict=True) if r in of)
        assert some.fair_seconds >= through / each * (1 - 1e-9)
        assert some.bound >= through / each * (1 - 1e-9)
    assert some.bound <= some.fair_seconds * (1 + 1e-9)


def test_a_flow_that_waits_twice() -> None:
    """Two flows share resource 0 (10 bytes/s), one of them resource 1 (4 bytes/s) too: rates 6 and
    4, until the first has moved its 30 bytes after 5 s; 20 of the other's 28 are through, and the
    rest takes 2 s at 4 bytes/s."""
    two = Flows(np.array([30.0, 28.0]), np.array([[0, 2], [0, 1]]), np.array([10.0, 4.0]))
    assert two.fair_seconds == pytest.approx(7.0)
    assert two.bound == pytest.approx(7.0)
    # With 20 bytes in the second: both end after 5 s, as resource 0 is always full.
    even = Flows(np.array([30.0, 20.0]), two.used, two.bandwidth)
    assert even.fair_seconds == pytest.approx(5.0)


def test_no_flows() -> None:
    none = Flows(np.zeros(0), np.zeros((0, 2), dtype=np.int64), np.array([1.0]))
    assert none.fair_seconds == none.bound == 0.0
