"""Rows that migrate on devices while a model trains: every bit of CPU ranks whose rows migrate at
the same steps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from tests.cuda.test_between_nodes import plan_of
from tests.cuda.test_training import same_training
from tests.support.cuda.device_engines import Schedule, device_of, start, train_on_both
from tests.support.examples import examples
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan

STEPS: Schedule = tuple((step,) for step in range(12))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


@examples(8)
@given(
    st.builds(
        Case,
        seed=st.integers(0, 1000),
        ranks=st.integers(1, 4),
        optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]),
        pooling=st.sampled_from(["sum", "mean", "none"]),
        dims=st.sampled_from([(4,), (8, 16)]),
        rows=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    ),
    st.sampled_from([0.0, 0.4]),
)
def test_rows_migrate_on_one_node(ranks, library, case, replicated):
    plans = [
        random_plan(case.seed + n, tables_of(case), case.ranks, replicated=replicated)
        for n in range(3)
    ]
    given = (case, plans[0], STEPS, library, None, plans[1:])
    same_training(ranks.run(case.ranks, train_on_both, *given))


@pytest.mark.parametrize("method", ["dense", "allgather"])
@pytest.mark.parametrize("number", [2, 3])
def test_replicas_migrate_under_every_method(ranks, library, number, method):
    case = Case(12, number, optimizer="adam", rows=(90, 9, 40))
    options = {"replicated": 0.4, "method": method}
    plans = [random_plan(12 + n, tables_of(case), number, **options) for n in range(3)]
    given = (case, plans[0], STEPS, library, None, plans[1:])
    same_training(ranks.run(number, train_on_both, *given))


@pytest.mark.parametrize("pooled", [0.0, 0.5])
@pytest.mark.parametrize(
    ("nodes", "method"),
    [
        ((0, 0, 1, 1), "bitmap"),
        ((0, 0, 1, 1), "dense"),
        ((0, 0, 1, 1), "allgather"),
        ((0, 1, 2, 3), "bitmap"),
    ],
)
def test_rows_migrate_between_nodes(ranks, library, nodes, pooled, method):
    case = Case(11, 4, optimizer="adam", rows=(300, 9, 80))
    first, *others = [
        plan_of(replace(case, seed=11 + n), nodes, pooled, method=method) for n in range(3)
    ]
    same_training(ranks.run(4, train_on_both, case, first, STEPS, library, nodes, others))


def migrate_without_room(rank: int, group: Any, case: Case, library: str | None) -> str:
    plans = [random_plan(n, tables_of(case), 2, replicated=float(n)) for n in range(2)]
    engine = start(case, plans[0], group, device_of(library))
    with pytest.raises(OperError) as found:
        engine.migrate(plans[1], 1000)
    return str(found.value)


def test_too_many_rows_for_a_device_are_refused(ranks, library):
    for text in ranks.run(2, migrate_without_room, Case(1, 2, rows=(300,)), library):
        assert "its memory was made to grow to" in text
        assert "shard with more spare memory" in text
