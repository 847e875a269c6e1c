"""What is counted as a wrong read and as its lag is what training's reads lacked."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.scheduler.cache_settings import CacheSettings
from tests.support.examples import examples
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds
from tests.support.scheduler.read_contents import Steps, lacking, train

some_steps = st.sampled_from([(), (), (1,), (0, 3, 4)])
cases = st.builds(
    Steps,
    seed=st.integers(0, 10_000),
    ranks=st.sampled_from([2, 3, 4]),
    steps=st.integers(4, 10),
    skew=st.sampled_from([1.0, 2.0, 6.0]),
    untrained=some_steps,
    evaluated=some_steps,
    late=some_steps,
)


def counted_and_real(ranks: Worlds, case: Steps, cache: CacheSettings):
    plan = random_plan(case.seed, (case.table,), case.ranks, tier=(0,))
    results = ranks.run(case.ranks, train, case, plan, cache)
    counted = results[0][1]
    assert all(of_rank == counted for _, of_rank in results)
    reads = [of_rank for of_rank, _ in results]
    distinct = [
        sum(len(set(case.rows(step, rank, number).tolist())) for step, number, _ in of_rank)
        for rank, of_rank in enumerate(reads)
    ]
    assert counted["reads"] == distinct
    return (counted["wrong_reads"], counted["lag"]), lacking(case, reads)


@examples(25)
@given(
    cases,
    st.sampled_from(["25%", "50%", "100%"]),
    st.sampled_from(["het", "het:0", "het:1", "het:4", "het:inf", "het-exact:0", "het-exact:3"]),
    st.sampled_from(["lru", "emark"]),
)
def test_wrong_reads_are_those_of_training(ranks, case, size, sync, evict):
    counted, real = counted_and_real(ranks, case, CacheSettings(size, sync, evict))
    assert counted[0] == real[0]
    # A step that is taken in the tier is one update to the counter, whoever trained the row.
    assert counted[1] == real[1] or case.late


@examples(20)
@given(
    cases,
    st.sampled_from(["25%", "100%"]),
    st.sampled_from(["bsp", "on-demand", "peer", "het-exact:0"]),
    st.sampled_from(["lru", "emark"]),
)
def test_exact_caches_read_all_updates(ranks, case, size, sync, evict):
    counted, real = counted_and_real(ranks, case, CacheSettings(size, sync, evict))
    assert counted == real == ([0] * case.ranks, [0] * case.ranks)


@pytest.mark.parametrize("sync", ["het", "het:1", "het-exact:2", "het:inf"])
def test_there_are_wrong_reads_and_right_ones(ranks, sync):
    case = Steps(seed=1, ranks=3, steps=12, skew=3.0)
    counted, real = counted_and_real(ranks, case, CacheSettings("100%", sync))
    assert counted == real
    assert min(real[0]) > 0
    alone = replace(case, ranks=1)
    assert counted_and_real(ranks, alone, CacheSettings("100%", sync))[1] == ([0], [0])
