"""What `oper plan` and `oper plan show` print: sentences first, ranks, tables by kind, and why."""

import copy
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oper.cli.plan_commands.plan_facts import threshold_text
from rich.cells import cell_len

from oper.analysis.plan_facts import link_use
from oper.base.formatting import format_share
from oper.cli.plan_commands.plan_text import copies_text, print_plan
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import rows_by_kind
from oper.planner.class_placement.greedy import MOST_HALVINGS
from oper.profiling.profile import Profile
from oper.topology.topology import Topology
from tests.support.commands import fine, oper

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def shown(here: Path) -> dict[str, Any]:
    fine(
        *[
            "plan",
            "p",
            "-o",
            "new",
            "--topology",
            "2x2-a100",
            "--extra-memory",
            "10%",
            "--threshold",
            "5%",
        ]
    )
    found: dict[str, Any] = json.loads(fine("plan", "show", "new", "--json"))
    return found


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["plan p -o other --topology 2x2-a100", "plan show q"])
def test_sentences_first_then_ranks_then_tables_then_why(here: Path, command: str) -> None:
    text = fine(*command.split())
    name = "q" if "show" in command else "other"
    assert one_line(text).startswith(f"{name}: 130 rows of 2 tables on 4 ranks (2x2-a100), for")
    order = ("Predicted iteration: ", "longer than the best possible", "rank ", "table ", "copies ")
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "without kernel launches and dense layers" in one_line(text)
    verbose = fine(*command.replace("other", "again").split(), "-v")
    for words in ("balance, min/max", "produced by", "rounds of swaps"):
        assert words in verbose
        assert words not in text
    for words in ("rows served", "access-bounded", "DoB"):
        assert words not in verbose


@pytest.mark.parametrize("command", ["plan p -o other --topology 2x2-a100", "plan show q"])
def test_json_has_each_table_and_rank_by_kind(here: Path, command: str) -> None:
    content = json.loads(fine(*command.split(), "--json"))
    plan = Plan.load(content["plan"])
    kinds = rows_by_kind(plan)
    assert [t["table"] for t in content["tables_by_kind"]] == ["C1", "C2"]
    for kind in ("replicated", "listed", "striped"):
        rows = [t[f"{kind}_rows"] for t in content["tables_by_kind"]]
        assert rows == getattr(kinds, kind).tolist()
    held = content["memory_by_kind"]
    assert list(held) == ["device"]
    assert np.sum(list(held["device"].values()), axis=0).tolist() == content["memory_bytes"]
    sizes = [t["memory_bytes"] for t in content["tables_by_kind"]]
    assert sum(sizes) == sum(content["memory_bytes"])


def test_tables_show_shares_of_the_accesses(
    here: Path, shown: dict[str, Any], capsys: Capture
) -> None:
    first, second = shown["tables_by_kind"]
    first |= {"listed_accesses": 300, "striped_rows": 5}
    second |= {"listed_accesses": 600, "striped_rows": 0}
    shown |= {"owner_accesses": [600, 0, 0, 0], "replica_accesses": 600}
    print_plan(shown, Topology.load("2x2-a100"), False)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("C1 ") and "≥ 25.0%" in line for line in lines)
    assert any(line.startswith("C2 ") and " 50.0%" in line and "≥" not in line for line in lines)


def test_the_profile_has_the_accesses_of_all_rows(here: Path) -> None:
    random = np.random.default_rng(0)
    columns = {name: (20_000 * random.random(60_000) ** 4).astype(int) for name in ("C1", "C2")}
    pq.write_table(pa.table(columns), "large.parquet")
    fine("profile", "large.parquet", "-o", "counts")
    counts = Profile.load("counts")
    accesses = [int(counts.table_accesses(t).sum()) for t in range(len(counts.tables))]
    make = ("plan", "counts", "-o", "new", "--topology", "cpu:2", "--force")
    made, text_made = json.loads(fine(*make, "--json")), fine(*make, "-v")
    assert "≥" in fine("plan", "show", "new", "-v")
    show = ("plan", "show", "new", "--profile", "counts")
    shown, text_shown = json.loads(fine(*show, "--json")), fine(*show, "-v")
    for content, text in ((made, text_made), (shown, text_shown)):
        tables = content["tables_by_kind"]
        assert [table["accesses"] for table in tables] == accesses
        assert any(table["accesses"] > table["listed_accesses"] for table in tables)
        assert "≥" not in text
        for table, count in zip(tables, accesses, strict=True):
            lines = [s for s in text.splitlines() if s.startswith(table["table"] + " ")]
            assert [format_share(count / sum(accesses), 1) in line for line in lines] == [True]


def test_another_profile_is_refused(here: Path, shown: dict[str, Any]) -> None:
    fine("profile", "log.parquet", "-o", "part", "--rows", "0:50%")
    said = oper("plan", "show", "new", "--profile", "part")
    assert said.status == 2
    assert "the plan was made from" in said.errors


NAMES = {
    "long": lambda n: f"table_with_a_name_of_sixty_characters_as_some_models_have_{n:03}",
    "wide": lambda n: f"表格名称很长的嵌入表格用于测试列宽度的显示和对齐情况{n}",
    "accents": lambda n: f"tablé_ünïcode_{n}",
}


def enlarged(content: dict[str, Any], ranks: int, tables: int, name: Any) -> dict[str, Any]:
    """The same content as if it were of so many ranks and tables, with sizes of billions."""
    big = copy.deepcopy(content)
    seconds = np.linspace(1e-3, 2e-3, ranks)
    for key in ("memory_bytes", "capacity_bytes", "lookups", "rank_seconds", "lookup_seconds"):
        big[key] = (seconds * 1e12).tolist() if "bytes" in key else seconds.tolist()
    for key in ("link_bytes", "link_seconds"):
        big[key] = np.ones((ranks, ranks)).tolist()
    entry = dict.fromkeys(big["tables_by_kind"][0], 2500000000)
    big["tables_by_kind"] = [
        {**entry, "table": name(n), "memory_bytes": 10**12 - n} for n in range(tables)
    ]
    return big | {"ranks": ranks}


# Of the largest plans, which take long to print, each name once.
LARGE = {("long", True), ("wide", False), ("accents", False)}


@pytest.mark.parametrize(
    ("name", "ranks", "tables", "verbose"),
    [
        pytest.param(
            *(name, ranks, tables, verbose),
            marks=[pytest.mark.slow] * (ranks == 1024 and (name, verbose) not in LARGE),
        )
        for name, (ranks, tables), verbose in itertools.product(
            NAMES, [(1024, 856), (4, 14), (17, 15)], [False, True]
        )
    ],
)
def test_many_ranks_and_tables_and_long_names_keep_100_columns(
    shown: dict[str, Any], capsys: Capture, name: str, ranks: int, tables: int, verbose: bool
) -> None:
    content = enlarged(shown, ranks, tables, NAMES[name])
    print_plan(content, Topology.load(f"1x{ranks}-a100"), verbose)
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= 100
    assert ("and 844 more" in text) == (tables == 856 and not verbose)
    assert (f"the fastest of {ranks:,} takes 1 ms" in text) == (ranks > 16 and not verbose)
    whole = re.sub(r"\s+", "", text)
    for number in range(tables if verbose else 12):
        start = NAMES[name](number)[:5]
        assert start in whole
    if not verbose:
        assert len(text.splitlines()) < 90


def test_infeasible_plans_say_so_at_the_top(shown: dict[str, Any], capsys: Capture) -> None:
    shown["feasible"] = False
    shown["memory_bytes"] = [10, 10, 5_000, 10]
    shown["capacity_bytes"] = [1_000] * 4
    print_plan(shown, Topology.load("2x2-a100"), False)
    head = capsys.readouterr().out.split("\n\n")[0]
    assert "INFEASIBLE: rank 2 holds 4 kB more than its capacity" in head


def asked(**more: Any) -> dict[str, Any]:
    content = {"ranks": 4, "mode": "training", "extra_memory_ratio": 0.0, "objective_seconds": 1.0}
    return content | {"asked": {"extra_memory": 0.05}, "capacity_bytes": [32e9]} | more


def test_why_copies_take_less_than_was_allowed() -> None:
    assert copies_text(asked()) == (
        "none, though 5% of the tables' bytes were allowed: one would save less in reads than its "
        "gradients cost, or not fit"
    )
    some = copies_text(asked(mode="inference", extra_memory_ratio=0.01))
    assert some.startswith("they take 1% of the tables' bytes, though 5%")
    assert some.endswith("another would save no time, or not fit")
    assert copies_text(asked(extra_memory_ratio=0.0499)).endswith("as much as was allowed")
    assert copies_text(asked(asked={"extra_memory": 0.0})) == "none, as asked"
    assert copies_text(asked(full_memory_bound_seconds=0.99)).endswith(
        "32 GB a rank, an iteration would be at most 1.00% shorter"
    )
    assert copies_text(asked(ranks=1)) == "none: there is one rank"
    of_devices = {"objective_seconds": 0.5, "certificate": {"full_memory_bound_seconds": 0.4}}
    with_tier = asked(parts={"devices": of_devices, "tier": {}})
    assert copies_text(with_tier).endswith("an iteration would be at most 20.00% shorter")


@pytest.mark.parametrize(
    ("now", "reason", "words"),
    [
        (
            0.001,
            "both balances reached 99.9000% before refining",
            "0.1%, as asked, where the ranks",
        ),
        (0.00025, "halving the threshold no longer helped", "0.1% asked; halved to 0.025%, where "),
        (0.001, "halving the threshold no longer helped", "0.1%, as asked, as halving it did not"),
        (1e-9, f"the threshold was halved {MOST_HALVINGS} times", "0.0000001%, the least that is"),
        (0.001, "as asked: the step that placed", "0.1%, as asked, but this plan's rows were not"),
    ],
)
def test_thresholds_as_asked_and_as_ended(now: float, reason: str, words: str) -> None:
    wanted = {"threshold": 0.001, "dob": 0.999}
    text = threshold_text({"threshold": now, "threshold_reason": reason, "asked": wanted})
    assert words in text
    assert ("partitions of at most this share" in text) == ("but this plan's rows" not in text)


def test_reasons_of_thresholds_are_those_the_planner_gives(here: Path) -> None:
    """Each is one that the words above are made for."""
    found = set()
    for options in ("--threshold 50% --dob 100%", "--threshold 5% --dob 1%", "--threshold 0.01%"):
        command = f"plan p -o new --force --topology cpu:3 --mode inference {options} --json"
        found.add(json.loads(fine(*command.split()))["threshold_reason"].split()[0])
    assert found <= {"both", "halving", "the", "as"}
    assert {"both", "halving"} <= found


def used(link_bytes: Any, topology: Topology, balance: float = 0.2) -> str | None:
    ranks = topology.ranks
    content = {
        "ranks": ranks,
        "link_bytes": np.array(link_bytes).tolist(),
        "dob": {"link_cost": balance},
        "rank_seconds": [1.0] * ranks,
    }
    return link_use(content, topology)


def test_links_are_explained_where_they_differ_and_only_there() -> None:
    alike, nodes = Topology.load("1x4-a100"), Topology.load("2x2-a100")
    even = np.ones((4, 4))
    assert used(even, alike, 0.99) is None
    assert used(even, Topology.load("cpu:1"), 1.0) is None
    assert used(0 * even, nodes) is None
    uneven = used(even, alike, 0.5)
    assert uneven is not None
    assert "the least busy is used 50.0% as long" in uneven
    away = nodes.masks()["other_node"]
    same = used(1000 * even, nodes)
    assert same is not None
    assert "carry as much as fast ones, 1 kB a pair" in same
    assert "67% of the links are 4.21 times slower" in same
    less, more = (used(np.where(away, part, 1000), nodes) for part in (100, 5000))
    assert less is not None
    assert "ranks read less through these: 100 B a pair of ranks, 1 kB through fast ones" in less
    assert more is not None
    assert "5 kB a pair of ranks go through these, 1 kB through fast ones" in more


@given(st.integers(2, 5), st.integers(0, 100))
def test_bytes_through_links_are_the_means_of_their_pairs(ranks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    cost = random.choice([1.0, 3.0], (ranks, ranks))
    moved = np.where(cost > 1, 10.0, 20.0)
    topology: Any = SimpleNamespace(link_cost=cost, ranks=ranks)
    text = used(moved, topology, 0.1)
    assert text is not None
    away = cost[~np.eye(ranks, dtype=bool)]
    differ = away.min() < away.max()
    assert ("3.00 times slower" in text) == differ
    assert ("10 B a pair of ranks, 20 B through fast ones" in text) == differ
