"""Plans and profiles of equal sizes whose vocabularies differ: their rows are not the same rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import oper
from oper.base.errors import OperError
from oper.logs import LogOptions, Prepared, RowReader, open_log
from oper.logs.vocabulary import digest_of
from oper.profiling.counting import count
from oper.profiling.profile import Profile
from tests.support.commands import fine, refused
from tests.support.commands import oper as run

REMEDY = "count the log by the plan's tables: oper profile LOG --tables PLAN"
VALUES = 60


def accesses(place: int) -> int:
    """Return how often a day's log has the value at a place in the order of their frequency."""
    return 900 // (place + 1) + VALUES - place


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles and plans of two days: the hot values of the second are others, in equal number."""
    monkeypatch.chdir(tmp_path)
    for day, names in (("mon", range(VALUES)), ("tue", reversed(range(VALUES)))):
        values = [f"v{n}" for place, n in enumerate(names) for _ in range(accesses(place))]
        pq.write_table(pa.table({"item": values}), f"{day}.parquet")
        fine("profile", f"{day}.parquet", "-o", day)
        fine("plan", day, "--topology", "1x2-a100", "--extra-memory", "0", "-o", f"plan-{day}")
    fine("profile", "tue.parquet", "--tables", "plan-mon", "-o", "tue-by-mon")


@pytest.mark.parametrize(
    "command",
    [
        "drift plan-mon tue",
        "drift plan-mon tue --all-windows",
        "replan plan-mon tue -o new",
        "report plan-mon --profile tue -o page.html",
        "report plan-mon plan-tue -o page.html",
        "plan diff plan-mon plan-tue",
    ],
)
def test_another_vocabulary_is_refused(command: str) -> None:
    refused(command, "table 'item'", "60 values", REMEDY)


@pytest.mark.parametrize(
    "command",
    [
        "plan explain plan-mon --table item --row 1 --profile tue",
        "plan show plan-mon --profile tue",
        "profiles merge mon tue -o sum",
    ],
)
def test_profiles_of_other_vocabularies_are_others(command: str) -> None:
    refused(command, "the first" if "merge" in command else "made from")


def test_the_plans_own_vocabulary_is_accepted_with_the_right_counts() -> None:
    counted = Profile.load("tue-by-mon").accesses.tolist()
    by_value = {f"v{n}": accesses(VALUES - 1 - n) for n in range(VALUES)}
    rows = Profile.load("mon").prepared().vocabularies["item"]["value"].to_pylist()
    assert counted == [0, *(by_value[value] for value in rows)]
    assert Profile.load("tue").accesses.tolist() != counted
    found = oper.drift("plan-mon", "tue-by-mon")
    by_hand = replace(Profile.load("mon"), accesses=np.array(counted, np.uint32), bag_lengths=None)
    assert found.judgement == oper.drift("plan-mon", by_hand).judgement
    assert found.judgement.keep.transfer_seconds > found.rank_seconds.then.max()
    fine("replan", "plan-mon", "tue-by-mon", "-o", "new")
    fine("plan", "diff", "plan-mon", "new")


def test_a_changed_last_value_is_refused() -> None:
    values = pq.read_table("mon.parquet")["item"].to_pylist()
    last = Profile.load("mon").prepared().vocabularies["item"]["value"][-1].as_py()
    changed = ["zz" if value == last else value for value in values]
    pq.write_table(pa.table({"item": changed}), "changed.parquet")
    fine("profile", "changed.parquet", "-o", "changed")
    assert np.array_equal(Profile.load("changed").accesses, Profile.load("mon").accesses)
    for command in ("drift plan-mon changed", "replan plan-mon changed -o new"):
        refused(command, "60 values", REMEDY)


def grown(name: str, first: list[str]) -> None:
    """Count Tuesday's log by Monday's vocabulary with `first` in front and two values behind it."""
    known = Profile.load("mon").prepared()
    values = first + known.vocabularies["item"]["value"].to_pylist() + ["new1", "new2"]
    number = len(values)
    content = pa.table(
        {"value": values, "count": [1] * number, "row": np.arange(1, number + 1, dtype=np.int64)}
    )
    (table,) = known.tables
    ids = replace(table.ids, vocabulary=digest_of(content))
    prepared = Prepared((replace(table, rows=number + 1, ids=ids),), {"item": content})
    reader = RowReader(open_log(["tue.parquet"], LogOptions()), prepared)
    count(reader, prepared=prepared)[0].save(name)


def test_replan_follows_a_vocabulary_that_grew_at_its_end() -> None:
    grown("grown", [])
    fine("replan", "plan-mon", "grown", "-o", "new")
    assert oper.Plan.load("new").tables[0].rows == VALUES + 3
    grown("shifted", ["new0"])
    refused("replan plan-mon shifted -o other", "begins with the 60 values of the plan", REMEDY)


def test_unknown_values_are_told() -> None:
    pq.write_table(pa.table({"item": ["v1"] * 11 + ["who"]}), "late.parquet")
    said = run("profile", "late.parquet", "--tables", "plan-mon", "-o", "late")
    assert "8.33% of accesses are of values that the vocabulary does not know" in said.out
    for command in (("drift", "plan-mon", "late"), ("replan", "plan-mon", "late", "-o", "new")):
        assert "8.33% of accesses" in run(*command).errors


@pytest.mark.parametrize(("options", "verdict"), [((), "replan"), (("--min-count", 90), "keep")])
def test_rare_values_that_are_left_out_are_no_drift(
    options: tuple[object, ...], verdict: str
) -> None:
    fine("profile", "mon.parquet", "-o", "rare", *options)
    fine("plan", "rare", "--topology", "1x2-a100", "--extra-memory", "0", "-o", "plan-rare")
    values = ["v0"] * 8 + ["who"] * 2
    pq.write_table(pa.table({"item": values * 2000}), "late.parquet")
    fine("profile", "late.parquet", "--tables", "plan-rare", "-o", "late")
    found = oper.drift("plan-rare", "late", 0.5)
    assert found.verdict == verdict
    assert [each.unknown_share for each in found.vocabularies] == ([0.2] if not options else [])


def model() -> nn.Module:
    config = EmbeddingBagConfig(
        name="item", embedding_dim=64, num_embeddings=VALUES + 1, feature_names=["item"]
    )
    return EmbeddingBagCollection(tables=[config])


def test_tables_without_their_vocabulary_are_refused() -> None:
    tables = oper.Plan.load("plan-mon").tables
    oper.profile("mon.parquet", tables)
    with pytest.raises(OperError, match="give the profile or plan"):
        oper.profile("tue.parquet", tables)


def test_models_are_not_moved_to_nor_loaded_under_another_vocabulary(tmp_path: Path) -> None:
    for day in ("mon", "tue"):
        fine("plan", day, "--topology", "cpu:1", "-o", f"one-{day}")
    trained = oper.shard(model(), "one-mon")
    oper.save(trained, tmp_path / "saved")
    oper.load(oper.shard(model(), "one-mon"), tmp_path / "saved")
    with pytest.raises(OperError, match="begins with the 60 values of the model's plan"):
        oper.migrate(trained, "one-tue")
    with pytest.raises(OperError, match="load it under the plan that it was saved by"):
        oper.load(oper.shard(model(), "one-tue"), tmp_path / "saved")
    fine("checkpoint", "reshard", "saved", "-o", "two", "--ranks", "2")
    with pytest.raises(OperError, match="load it under the plan that it was saved by"):
        oper.load(oper.shard(model(), "one-tue"), tmp_path / "two")
    wrong = pytest.raises(OperError, match="values of the monitored plan")
    with oper.monitor(trained, "one-mon") as monitor, wrong:
        monitor.follow("one-tue")
