"""Placements as the simulator takes them, against the plan's address map and TorchRec's shards."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

import oper
from benchmarks.planning.simulated_placements import make_log, oper_placement, shard_parts
from benchmarks.planning.simulator.placement import Fetch
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.planner.baselines.torchrec_planner import Shard
from oper.topology.latency import Latency

pytest.importorskip("torchrec")  # whose batches the log is counted from
Mode = Literal["training", "inference"]


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_rows_of_a_plan(mode: Mode) -> None:
    """Every rank reads every row from where its addresses say."""
    recipe, _, profile = make_log(scale=0.0005, bag=1, samples=4096)
    topology = replace(oper.Topology.load("2x2-h100"), latency=Latency.of_hops(0.0))  # copies pay
    workload = oper.Workload(mode, "raw", batch_size=65_536)
    plan = oper.make_plan(profile, topology, workload, oper.PlanSettings(extra_memory=0.3))
    placement = oper_placement(replace(plan, pooled_tables=(recipe.tables[1].name,)))
    assert placement.replicated[np.concatenate([p.holder_set for p in placement.parts])].any()
    for t, part in enumerate(placement.parts):
        assert part.fetch is (Fetch.POOLED_BY_NODE if t == 1 else Fetch.RAW)
        for rank in range(4):
            rows = np.arange(recipe.tables[t].rows)
            field = plan.layout.addresses(t, rows, rank) >> SLOT_BITS
            source = np.where(field == LOCAL, rank, field)
            np.testing.assert_array_equal(placement.source[part.holder_set, rank], source)


def test_shards() -> None:
    """A table on one rank, one in two ranges of rows, one in two halves of its columns, one in both
    ways, and one on all ranks."""
    recipe, _, profile = make_log(scale=0.0005, bag=1, samples=4096)
    profile = replace(profile, tables=recipe.tables[:5])
    begin = [int(offset) for offset in profile.offsets]
    rows = [table.rows for table in profile.tables]

    def shard(t: int, kind: str, rank: int, first: int, last: int, columns: int = 64) -> Shard:
        return Shard(t, kind, rank, begin[t] + first, begin[t] + last, columns)

    shards = [
        shard(0, "table_wise", 2, 0, rows[0]),
        shard(1, "row_wise", 0, 0, 5),
        shard(1, "row_wise", 1, 5, rows[1]),
        shard(2, "column_wise", 3, 0, rows[2], 32),
        shard(2, "column_wise", 1, 0, rows[2], 32),
        shard(3, "grid_shard", 0, 0, 4, 32),
        shard(3, "grid_shard", 1, 4, rows[3], 32),
        shard(3, "grid_shard", 2, 0, 4, 32),
        shard(3, "grid_shard", 3, 4, rows[3], 32),
        shard(4, "data_parallel", -1, 0, rows[4]),
    ]
    parts = list(shard_parts(shards, profile, "training", 4))
    assert [part.table for part in parts] == [0, 1, 2, 2, 3, 3, 4]
    assert [part.dim for part in parts] == [64, 64, 32, 32, 32, 32, 64]
    assert [part.row_bytes for part in parts] == [256, 256, 128, 128, 128, 128, 256]
    sets = [part.holder_set for part in parts]
    assert set(sets[0]) == {2}
    assert sets[1].tolist() == [0] * 5 + [1] * (rows[1] - 5)
    assert (set(sets[2]), set(sets[3])) == ({3}, {1})
    assert sets[5].tolist() == [2] * 4 + [3] * (rows[3] - 4)
    assert set(sets[6]) == {4}  # after those of single owners
    assert [part.fetch for part in parts[:5]] == [Fetch.POOLED_BY_RANK] * 4 + [
        Fetch.POOLED_BY_RANK_AND_NODE
    ]
    assert parts[6].fetch is Fetch.RAW
