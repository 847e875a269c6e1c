"""Ids that are numbered unlike the profile's are told from those that are not, by any batch that
can tell, and from nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import oper as package
from oper.base.errors import OperError
from oper.diagnosis.id_numbering import (
    HotRows,
    Verdict,
    hot_rows_of_plan,
    hot_rows_of_profile,
    judge,
)
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from tests.support.commands import fine, oper, refused
from tests.support.examples import examples

PROFILED = 50_000  # samples
ONE_EACH = np.ones(PROFILED, np.int64)
zipf = st.tuples(
    st.integers(0, 10_000),  # seed
    st.integers(500, 20_000),  # rows
    st.floats(0.8, 1.3),  # exponent
    st.integers(1, 4),  # ids of a sample
)


def drawn(random: Any, rows: int, exponent: float, samples: int, each: int, of: Any) -> Any:
    """Ids of a Zipf law whose r-th row by frequency is called of[r], int64 [samples * each]."""
    weights = np.arange(1, rows + 1) ** -exponent
    return of[random.choice(rows, samples * each, p=weights / weights.sum())]


def counted(ids: Any, rows: int, each: int = 1) -> Profile:
    counts = np.bincount(ids, minlength=rows).astype(np.uint32)
    with_row = counts if each > 1 else counts[:0]
    return Profile((Table("t", rows, 4),), len(ids) // each, counts, with_row, (each > 1,))


def sources(profile: Profile, each: int) -> list[HotRows | None]:
    """What the profile has of its table, and what a plan made from it has."""
    workload = package.Workload("training", batch_size=512)
    plan = package.make_plan(profile, package.Topology.load("cpu:4"), workload)
    return [hot_rows_of_profile(profile, 0), hot_rows_of_plan(plan, 0, each)]


@examples(25)
@given(zipf, st.integers(200, 8000))
def test_renumbered_ids_are_told_from_those_of_the_profile(
    of: tuple[int, int, float, int], samples: int
) -> None:
    seed, rows, exponent, each = of
    random = np.random.default_rng(seed)
    names = random.permutation(rows)
    profile = counted(drawn(random, rows, exponent, PROFILED, each, names), rows, each)
    ids = drawn(random, rows, exponent, samples, each, names)
    of_samples = np.full(samples, each)
    for hot in sources(profile, each):
        assert judge("t", hot, ids, of_samples).verdict in (Verdict.ALIKE, Verdict.UNKNOWN)
        said = [
            judge("t", hot, random.permutation(rows)[ids], of_samples).verdict for _ in range(20)
        ]
        # One in 26 at most may hide in luck.
        assert said.count(Verdict.ALIKE) <= 3
        told = judge("t", hot, ids, of_samples).verdict == Verdict.ALIKE
        assert not told or said.count(Verdict.OTHER) >= 17


def test_a_real_sized_batch_of_a_skewed_table_tells() -> None:
    random = np.random.default_rng(0)
    names = random.permutation(10_000)
    profile = counted(drawn(random, 10_000, 1.05, PROFILED, 1, names), 10_000)
    ids = drawn(random, 10_000, 1.05, 2048, 1, names)
    for hot in sources(profile, 1):
        assert judge("t", hot, ids, ONE_EACH[:2048]).verdict == Verdict.ALIKE
        other = judge("t", hot, random.permutation(10_000)[ids], ONE_EACH[:2048])
        assert other.verdict == Verdict.OTHER
        assert hot is not None
        assert other.share < 0.2 * hot.share


@examples(20)
@given(st.integers(0, 10_000), st.integers(1, 5000), st.integers(1, 5000))
def test_of_uniform_tables_nothing_is_told(seed: int, rows: int, samples: int) -> None:
    random = np.random.default_rng(seed)
    profile = counted(random.integers(0, rows, PROFILED), rows)
    ids = random.integers(0, rows, samples)
    for hot in sources(profile, 1):
        assert judge("t", hot, ids, ONE_EACH[:samples]).verdict == Verdict.UNKNOWN


def test_rows_that_the_profile_saw_once_promise_nothing() -> None:
    """Each of 5,000 accesses had a row of its own: a set of those rows has all of the profile's
    accesses, and hardly one of another sample's."""
    random = np.random.default_rng(0)
    profile = counted(random.permutation(1_000_000)[:5000], 1_000_000)
    assert hot_rows_of_profile(profile, 0) is None


@examples(30)
@given(zipf)
def test_the_share_of_hot_rows_is_that_of_samples_not_seen(
    of: tuple[int, int, float, int],
) -> None:
    """As the rows are chosen by the counts, their share of these is too large a promise."""
    seed, rows, exponent, _ = of
    random = np.random.default_rng(seed)
    names = random.permutation(rows)
    profile = counted(drawn(random, rows, exponent, 5000, 1, names), rows)
    hot = hot_rows_of_profile(profile, 0)
    assert hot is not None
    unseen = hot.contains(drawn(random, rows, exponent, 50_000, 1, names)).mean()
    assert unseen == pytest.approx(hot.share, abs=0.05)


# Of a model


def model(features: str = "ab") -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=f, num_embeddings=2000, embedding_dim=8, feature_names=[f])
        for f in features
    ]
    return nn.ModuleDict({"tables": EmbeddingBagCollection(configs)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log of two tables, of which `b` is read uniformly, its profile and plan,
    and what a script gives a model: the same ids, and `a` numbered otherwise."""
    folder, random = tmp_path_factory.mktemp("numbered"), np.random.default_rng(0)
    names = random.permutation(2000)

    def write(name: str, samples: int, renumbered: Any) -> None:
        columns = {
            "a": renumbered[drawn(random, 2000, 1.1, samples, 1, names)],
            "b": random.integers(0, 2000, samples),
        }
        pq.write_table(pa.table(columns), folder / name)

    write("log.parquet", 40_000, np.arange(2000))
    write("same.parquet", 1024, np.arange(2000))
    write("other.parquet", 1024, random.permutation(2000))
    write("raw.parquet", 1024, np.arange(2000) + 1000)
    tables = folder / "tables.yaml"
    tables.write_text(
        "tables:\n" + "".join(f"  - {{name: {t}, rows: 2000, dim: 8}}\n" for t in "ab")
    )
    fine("profile", folder / "log.parquet", "--tables", tables, "-o", folder / "profile")
    fine("plan", folder / "profile", "--topology", "cpu:2", "-o", folder / "plan")
    (folder / "model.py").write_text(
        "from torchrec import EmbeddingBagCollection, EmbeddingBagConfig\n\n\n"
        "def make():\n"
        "    return EmbeddingBagCollection([EmbeddingBagConfig(name=f, num_embeddings=2000, "
        "embedding_dim=8, feature_names=[f]) for f in 'ab'])\n"
    )
    return folder


def findings(made: Path, batch: str, *more: object) -> list[tuple[str, str]]:
    command = ("doctor", made / "plan", f"{made / 'model.py'}:make", "--json")
    said = oper(*command, "--batch", made / batch, *more)
    found = json.loads(said.out)
    assert said.status == (not found["ok"])
    return [(f["level"], f["says"]) for f in found["findings"] if f["about"] == "ids"]


@pytest.mark.parametrize("given", [(), ("--profile", "profile")], ids=["plan", "profile"])
def test_the_command_says_which_tables_are_numbered_otherwise(
    made: Path, given: tuple[str, ...]
) -> None:
    more = given and (given[0], made / given[1])
    (level, says), (unknown, of) = findings(made, "same.parquet", *more)
    assert (level, unknown) == ("ok", "note")
    assert says.startswith("numbered as in the profile, in 1 table of 2")
    assert "cannot be told of 1 table (b)" in of
    (level, says), _ = findings(made, "other.parquet", *more)
    assert level == "problem"
    assert "the ids of table 'a' are numbered unlike the profile's: its " in says
    assert " hottest rows took " in says
    (level, says), *_ = findings(made, "raw.parquet", *more)
    assert level == "problem"
    assert "table 'a': " in says
    assert " of its ids in the batch are none of its rows" in says


def batches(made: Path, name: str) -> KeyedJaggedTensor:
    table = pq.read_table(made / name)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"],
        values=torch.tensor(np.concatenate([table["a"].to_numpy(), table["b"].to_numpy()])),
        lengths=torch.ones(2 * len(table), dtype=torch.int32),
    )


def test_python_takes_a_batch_or_a_loader(made: Path) -> None:
    for name, level in (("same.parquet", "ok"), ("other.parquet", "problem")):
        batch = batches(made, name)
        for held in (batch, [batch], iter([(torch.zeros(1), batch)]), made / name):
            found = package.doctor(made / "plan", model(), batch=held)
            (first, *_) = (f for f in found.findings if f.about == "ids")
            assert first.level == level
    (note,) = (f for f in package.doctor(made / "plan", model()).findings if f.about == "ids")
    assert "was not looked at" in note.says


def test_what_does_not_go_together(made: Path) -> None:
    with pytest.raises(OperError, match="profile is for reading a batch"):
        package.doctor(made / "plan", model(), profile=made / "profile")
    pq.write_table(
        pq.read_table(made / "same.parquet").drop_columns(["a"]), made / "lacking.parquet"
    )
    with pytest.raises(OperError, match=r"has no column 'a', by which .* it has b; give"):
        package.doctor(made / "plan", model(), batch=made / "lacking.parquet")
    other = Plan.load(made / "plan")
    with pytest.raises(OperError, match="made from"):
        package.doctor(
            other, model(), batch=made / "same.parquet", profile=counted(np.arange(9), 9)
        )
    command = f"doctor {made / 'plan'} {made / 'model.py'}:make"
    refused(f"{command} --profile {made / 'profile'}", "give the batch too")
