"""Serving: the answers are the lookup's, and every request counts once."""

from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

import oper
from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowBlock
from oper.tables.table import tables_of
from oper.torchrec.measure_latency import measure_latency
from tests.support.runtime.engine_cases import Case, batch_of, initial, module_tables
from tests.support.runtime.engine_cases import tables_of as tables_of_case
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import BAGS, batch

SEQUENCE = EmbeddingConfig(
    name="seen", num_embeddings=40, embedding_dim=8, feature_names=["s0", "s1"]
)


def engine_of(mode: str) -> tuple[EmbeddingEngine, Case]:
    case = Case(seed=1, ranks=1)
    engine = EmbeddingEngine(
        random_plan(1, tables_of_case(case), 1, mode=mode), module_tables(case), deadline_seconds=60
    )
    engine.write_rows([RowBlock(n, 0, initial(case, n)) for n in range(len(case.rows))])
    return engine, case


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_an_engine_serves(mode: str) -> None:
    engine, case = engine_of(mode)
    latencies, last = measure_latency(
        engine, (batch_of(case, step, 0) for step in range(9)), warm_up=2
    )
    assert len(latencies.seconds) == 7
    assert engine.counters.totals["lookups"] == 9
    assert engine.counters.totals["steps"] == 0
    assert torch.equal(last, engine(batch_of(case, 8, 0)))
    found = latencies.to_dict()
    assert found["requests"] == 7
    assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert latencies.per_second > 0


@pytest.mark.parametrize("what", ["sharded", "collection", "unsharded"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_collection_serves(kind: str, what: str) -> None:
    unsharded: Any = (
        EmbeddingBagCollection(list(BAGS)) if kind == "bags" else EmbeddingCollection([SEQUENCE])
    )
    plan = random_plan(2, tables_of(unsharded), 1, mode="inference")
    sharded = oper.shard(unsharded, plan)
    model = {"sharded": sharded, "collection": sharded.module, "unsharded": unsharded}[what]
    requests = [batch(step).ids for step in range(5)]
    _, last = oper.measure_latency(model, requests, warm_up=0)
    expected = unsharded(requests[-1])
    if kind == "bags":
        torch.testing.assert_close(last.values(), expected.values())
    else:
        assert set(last) == {"s0", "s1"}
        for key, jagged in expected.items():
            torch.testing.assert_close(last[key].values(), jagged.values())


def test_answers_of_devices_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, case = engine_of("inference")
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(waited)))
    measure_latency(engine, [batch_of(case, step, 0) for step in range(3)], warm_up=1)
    assert len(waited) == 3


def test_what_cannot_be_served_is_said() -> None:
    engine, case = engine_of("inference")
    with pytest.raises(OperError, match="expected more requests than the 3 of the warm-up, got 3"):
        measure_latency(engine, [batch_of(case, step, 0) for step in range(3)])
    wrong = KeyedJaggedTensor(["f9"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(OperError, match="'f0': the batch does not hold it"):
        measure_latency(engine, [batch_of(case, 0, 0), wrong], warm_up=0)
