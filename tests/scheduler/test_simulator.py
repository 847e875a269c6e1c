"""The simulator: what it replays, against counts made by hand, and its baselines."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import oper
from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.simulate import simulate as simulate_command
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.scheduler.fae import most_frequent
from oper.scheduler.row_addresses import WIDTH_SHIFT
from oper.scheduler.simulator import Methods, SimulatedRun, SimulationSettings, replay
from oper.scheduler.trace import Trace
from oper.tables.table import Table
from tests.support.commands import fine


def make_trace(folder: Path, columns: dict[str, Any], tables: list[Table], size: int) -> Trace:
    pq.write_table(pa.table(columns), folder / "log.parquet")
    log = open_log(folder / "log.parquet", LogOptions(columns=tuple(columns)))
    return Trace(RowReader(log, prepare(log, tables)), size)


def tables(*rows: int, dims: tuple[int, ...] = (4, 4)) -> list[Table]:
    pairs = zip(rows, dims, strict=True)
    return [Table(f"T{n}", r, d, optimizer="sgd") for n, (r, d) in enumerate(pairs)]


def run(trace: Trace, policy: str, sync: str, **settings: Any) -> SimulatedRun:
    made = SimulationSettings(
        **{"workers": 2, "batch_size": trace.batch_size, "warm_up": 0, **settings}
    )
    return replay(trace, made, Methods.parse(policy, sync, "lru")).runs[f"{policy}+{sync}"]


def test_bags_and_several_widths_become_addresses(tmp_path: Path) -> None:
    columns = {"T0": [[1, 2], [], [3]], "T1": [4, 0, 1]}
    trace = make_trace(tmp_path, columns, tables(5, 6, dims=(4, 8)), 2)
    narrow, wide = 0, (1 << WIDTH_SHIFT) + 5
    first, second = trace
    assert first.addresses.tolist() == [narrow + 1, narrow + 2, wide + 4, wide + 0]
    assert first.offsets.tolist() == [0, 3, 4]
    assert second.addresses.tolist() == [narrow + 3, wide + 1]
    assert trace.rows_of_width.tolist() == [5, 6]
    assert trace.addresses_of(np.array([0, 4, 5, 10])).tolist() == [0, 4, wide, wide + 5]


def test_in_order_by_hand(tmp_path: Path) -> None:
    # Two iterations of two samples a worker; rows of the second column are 10 on.
    columns = {"T0": [0, 0, 1, 0, 0, 1, 1, 2], "T1": [0, 1, 2, 3, 0, 1, 2, 3]}
    trace = make_trace(tmp_path, columns, tables(10, 10), 4)
    # Worker 0 trains 0, 10, 11 and worker 1 rows 1, 0, 12, 13: row 0 is in both. Then worker 0
    # trains 0, 10, 1, 11 and worker 1 rows 1, 12, 2, 13: row 1 has one trainer, is pushed for the
    # other, and worker 1 still has the latest copy; row 0 was partial in both.
    found = run(trace, "in-order", "on-demand", cache_share=1.0)
    assert found.miss_pull == 3 + 4 + 2 + 1
    assert found.update_push == 2 + 1
    assert (found.reads, found.hits) == (15, 5)
    assert found.wrong_reads == found.evict_push == 0
    assert found.barrier_cost == 4 + (2 + 2)
    full = run(trace, "in-order", "bsp", cache_share=1.0)
    assert full.update_push == full.reads == 15
    assert full.miss_pull == found.miss_pull


def test_links_price_bytes(tmp_path: Path) -> None:
    columns = {"T0": [0, 1, 2, 3], "T1": [0, 1, 2, 3]}
    trace = make_trace(tmp_path, columns, tables(10, 10), 4)
    found = run(trace, "in-order", "bsp", cache_share=1.0, link_bandwidth=(16.0, 1.6))
    # Each worker pulls and pushes four rows of 16 bytes.
    assert found.cost_seconds == pytest.approx(8 * 16 / 16 + 8 * 16 / 1.6)


def test_fae_by_hand(tmp_path: Path) -> None:
    columns = {"T0": [0, 0, 1, 0, 0, 1, 1, 2], "T1": [0, 1, 2, 3, 0, 1, 2, 3]}
    trace = make_trace(tmp_path, columns, tables(10, 10), 4)
    assert most_frequent(trace, 0.1).tolist() == [0, 1]
    found = run(trace, "in-order", "fae:10%")
    # Others than rows 0 and 1: 10, 11 and 12, 13; then 10, 11 and 12, 2, 13. Two frequent rows,
    # 2 · (2 − 1) / 2 of them sent by each worker in each iteration.
    assert found.miss_pull == found.update_push == 4 + 5
    assert found.peer_push == 2 * 2 * 2
    assert found.pull_bytes == 16 * 9
    assert found.push_bytes == 16 * (9 + 8)
    assert found.wrong_reads == 0


def test_fae_dispatches_by_nothing(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, {"T0": [0, 1], "T1": [0, 1]}, tables(3, 3), 4)
    with pytest.raises(OperError, match="random or in-order"):
        run(trace, "laia", "fae:1%")


def test_a_ragged_end_is_trained(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, {"T0": [0, 1, 2, 3, 4], "T1": [0] * 5}, tables(9, 9), 4)
    found = run(trace, "in-order", "bsp", cache_share=1.0)
    assert found.reads == (2 + 1) * 2 + 2


def test_the_function_returns_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).integers(0, 50, (64, 2))
    pq.write_table(pa.table({"a": rows[:, 0], "b": rows[:, 1]}), "log.parquet")
    settings = oper.SimulationSettings(2, 8, 0.5, [1e9, 5e8], warm_up=2, seed=3)
    found = oper.simulate(
        "log.parquet", settings=settings, policy=["laia", "esd"], evict="lru,emark"
    )
    options = "--workers 2 --batch-size 8 --cache 50% --links 8,4 --warm-up 2 --seed 3"
    methods = "--policy laia,esd --evict lru,emark"
    printed = json.loads(fine("simulate", "log.parquet", *f"{options} {methods} --json".split()))
    assert printed.pop("log") == ["log.parquet"]
    content = json.loads(json.dumps(found.to_json()))
    for runs in (printed["policies"], content["policies"]):
        for entry in runs.values():
            assert entry.pop("dispatch_ms") == sum(entry.pop("dispatch_parts_ms").values())
    assert content == printed
    names = [f"{p}+{s}+{e}" for p in ("laia", "esd") for s in ("bsp", "on-demand") for e in
             ("lru", "emark")]  # fmt: skip
    assert list(found.runs) == names
    least = min(run.total for run in found.runs.values())
    assert found.least_sent is not None
    assert found.runs[found.least_sent].total == least
    assert found.least_sent == found.least_sent_of_all


def test_the_least_sent_is_of_an_exact_run(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {f"T{n}": (200 * random.random(64 * 20) ** 2).astype(int) for n in range(2)}
    trace = make_trace(tmp_path, columns, tables(200, 200), 64)
    methods = Methods.parse("in-order", ["het:20", "bsp", "on-demand", "het-exact:0"], "lru")
    found = replay(trace, SimulationSettings(4, 64, 0.5, warm_up=0), methods)
    assert [run.exact for run in found.runs.values()] == [False, True, True, True]
    assert found.least_sent == "in-order+on-demand"
    assert found.least_sent_of_all == "in-order+het:20"
    content = found.to_json()
    assert content["least_sent"] == found.least_sent
    assert content["least_sent_of_all"] == found.least_sent_of_all
    for name, run in found.runs.items():
        entry = content["policies"][name]
        assert entry["exact"] == run.exact
        assert entry["wrong_read_ratio"] == run.wrong_reads / run.reads
    assert found.runs["in-order+het:20"].wrong_read_ratio
    stale = replay(trace, SimulationSettings(4, 64, 0.5, warm_up=0),
                   Methods.parse("in-order", "het:20", "lru"))  # fmt: skip
    assert stale.least_sent is None


ALL_SYNCS = "bsp,on-demand,peer,het,het:3,het-exact:0,het-exact:3"
ALL_POLICIES = "random,in-order,laia,laia:1,esd,esd:0.5,grouped,grouped:1,laia@0.5"


@pytest.mark.parametrize(
    ("policies", "syncs", "has_peers"),
    [
        (ALL_POLICIES, ALL_SYNCS, True),
        ("random,in-order", "fae:20%", True),
        ("random,in-order", "bsp,on-demand,het:3", False),
    ],
)
def test_printed_columns_add_up_to_what_was_sent(
    tmp_path: Path, policies: str, syncs: str, has_peers: bool
) -> None:
    random = np.random.default_rng(3)
    columns = {f"T{n}": (random.zipf(1.2, 400) - 1) % 60 for n in range(3)}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    options = "--columns T* --workers 4 --batch-size 32 --cache 70% --warm-up 1"
    said = fine(
        "simulate",
        tmp_path / "log.parquet",
        *options.split(),
        "--policy",
        policies,
        "--sync",
        syncs,
    )
    assert max(map(len, said.splitlines())) <= 100
    assert ("peer" in said.partition("dispatch, sync")[0]) or has_peers is False
    pushes = 3 if has_peers else 2
    lines = [line.split() for line in said.splitlines()]
    named = [w for w in lines if w and w[0] in policies.split(",") and len(w) > 6]
    assert len(named) == len(policies.split(",")) * len(syncs.split(","))
    for policy, sync, sent, _saved, *moved in named:
        numbers = [int(text.replace(",", "")) for text in moved[: 1 + pushes]]
        assert sum(numbers) == int(sent.replace(",", "")), (policy, sync)


def test_the_function_has_the_commands_defaults() -> None:
    command = signature(simulate_command).parameters
    settings = oper.SimulationSettings()
    assert command["workers"].default.default == settings.workers
    assert command["batch_size"].default.default == settings.batch_size
    assert parse_share(command["cache"].default.default, "") == settings.cache_share
    assert float(command["links"].default.default) * 1e9 / 8 == settings.link_bandwidth
    assert command["warm_up"].default.default == settings.warm_up
    assert command["seed"].default.default == settings.seed
    public = signature(oper.simulate).parameters
    for name in ("policy", "sync", "evict", "dim", "optimizer"):
        assert command[name].default.default == public[name].default


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 3}, "batch_size=1024: .* all 3 workers .* such as 1023 or 1026"),
        ({"workers": 0}, "workers=0: expected 1 or more"),
        ({"workers": 65, "batch_size": 65}, "workers=65: expected 1 to 64"),
        ({"batch_size": 4}, "batch_size=4: .* such as 8$"),
        ({"batch_size": 8.0}, "`batch_size`: expected a whole number, got '8.0'"),
        ({"cache_share": 0}, "cache_share=0: expected a share above 0"),
        ({"cache_share": "10%"}, "cache_share: expected a finite number, got '10%'"),
        ({"link_bandwidth": [1, 2]}, "link_bandwidth: expected 1 or 8.*got 2"),
        ({"link_bandwidth": 0}, "link_bandwidth: a worker without bandwidth"),
        ({"warm_up": -1}, "warm_up=-1: expected 0 or more"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OperError, match=words):
        oper.SimulationSettings(**given)


def test_what_is_no_settings() -> None:
    settings: Any = 8
    with pytest.raises(OperError, match="simulate: settings: expected SimulationSettings, got int"):
        oper.simulate("log.parquet", settings=settings)
