"""Dispatched samples on cached rows: the values of one process, and the transmissions that the
simulator counts on the same log."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from oper.logs import RowReader, open_log, prepare
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.simulator import Methods, SimulationSettings, replay
from oper.scheduler.trace import Trace
from tests.support.runtime.worlds import Worlds
from tests.support.scheduler import dispatched_cases as cases


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", ["in-order", "random", "laia", "esd", "grouped"])
@pytest.mark.parametrize("sync", ["bsp", "on-demand"])
def test_training_moves_what_the_simulator_counts(
    worlds: Worlds, tmp_path: Path, ranks: int, policy: str, sync: str
) -> None:
    rows = cases.log_of(ranks)
    pq.write_table(pa.table({"a": rows[:, 0], "b": rows[:, 1]}), tmp_path / "log.parquet")
    log = open_log(tmp_path / "log.parquet")
    trace = Trace(RowReader(log, prepare(log, cases.TABLES)), ranks * cases.SAMPLES)
    settings = SimulationSettings(ranks, ranks * cases.SAMPLES, 0.2, warm_up=0)
    simulated = replay(trace, settings, Methods.parse(policy, sync, "lru"))
    (expected,) = simulated.runs.values()
    found = worlds.run(ranks, cases.train, policy, CacheSettings("20%", sync))
    counted = found[0][0]
    for name in ("miss_pull", "update_push", "evict_push", "reads", "hits", "wrong_reads"):
        assert sum(counted[name]) == getattr(expected, name), name
    for _, tables in found:
        for mine, whole in zip(tables, _trained(rows, ranks), strict=True):
            torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-5)


def _trained(rows: np.ndarray, ranks: int) -> list[torch.Tensor]:
    """The tables as one process trains them from zero."""
    tables = [torch.zeros(t.rows, t.dim) for t in cases.TABLES]
    for batch in torch.from_numpy(rows).split(ranks * cases.SAMPLES):
        grads = cases.gradient_of(batch) / ranks
        for n, table in enumerate(tables):
            table.index_add_(0, batch[:, n], grads[:, 8 * n : 8 * n + 8], alpha=-cases.RATE)
    return tables
