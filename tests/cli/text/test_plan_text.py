"""Output of `oper plan -v` and `oper plan show`: summary, ranks, tables by kind, and reasons."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from oper.analysis.plan_facts import PlanFigures, Threshold, copies, link_use
from oper.analysis.wording import threshold_sentence
from oper.base.formatting import format_share
from oper.cli.plan_commands.plan_text import copies_text, links_text, print_plan
from oper.cost.objective import Balance, Cost
from oper.plan.certificate import Certificate
from oper.plan.memories import ThresholdReason
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import rows_by_kind
from oper.plan.settings import Limits
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.commands import fine, oper

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def shown(here: Path) -> PlanFigures:
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
    return PlanFigures.of(Plan.load("new"))


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["plan p -o other --topology 2x2-a100 -v", "plan show q"])
def test_the_summary_comes_first_then_ranks_then_tables_then_reasons(
    here: Path, command: str
) -> None:
    text = fine(*command.split())
    name = "q" if "show" in command else "other"
    assert one_line(text).startswith(f"{name}: 130 rows of 2 tables on 4 ranks (2x2-a100), for")
    order = (
        "\npredicted step  ",
        "above the lower bound",
        "\nrank  ",
        "\ntable  ",
        "\ncopies ",
    )
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "of rows and gradients alone" in one_line(text)
    assert "iteration" not in text
    verbose = fine("plan", "show", "q", "-v")
    for words in ("balance, min/max", "produced by", "rounds of swaps"):
        assert words in verbose
        assert (words in text) == command.endswith("-v")
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
    here: Path, shown: PlanFigures, capsys: Capture
) -> None:
    kinds = replace(shown.kinds, listed_accesses=np.array([300, 600]), striped=np.array([5, 0]))
    (memory,) = shown.plan.memories
    memory = replace(memory, owner_accesses=np.array([600, 0, 0, 0]), replica_accesses=600)
    print_plan(PlanFigures(replace(shown.plan, memories=(memory,)), kinds), "new", False)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("C1 ") and "≥ 25.0%" in line for line in lines)
    assert any(line.startswith("C2 ") and " 50.0%" in line and "≥" not in line for line in lines)


def test_fetched_is_what_a_rank_reads_from_the_others(shown: PlanFigures, capsys: Capture) -> None:
    (memory,) = shown.plan.memories
    link_bytes = np.zeros((4, 4))
    link_bytes[0, 1:] = 1e6  # all of it by rank 0, from each other rank
    memory = replace(memory, cost=replace(memory.cost, link_bytes=link_bytes))
    print_plan(PlanFigures(replace(shown.plan, memories=(memory,)), shown.kinds), "new", False)
    lines = capsys.readouterr().out.splitlines()
    header = next(n for n, line in enumerate(lines) if line.split()[:2] == ["rank", "memory"])
    ranks = lines[header + 1 : header + 5]
    assert ["3 MB" in line for line in ranks] == [True, False, False, False]
    assert ["1 MB" in line for line in ranks] == [False] * 4


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


def test_another_profile_is_refused(here: Path, shown: PlanFigures) -> None:
    fine("profile", "log.parquet", "-o", "part", "--rows", "0:50%")
    said = oper("plan", "show", "new", "--profile", "part")
    assert said.status == 2
    assert "the plan was made from" in said.errors


NAMES = {
    "long": lambda n: f"table_with_a_name_of_sixty_characters_as_some_models_have_{n:03}",
    "wide": lambda n: f"表格名称很长的嵌入表格用于测试列宽度的显示和对齐情况{n}",
    "accents": lambda n: f"tablé_ünïcode_{n}",
}


def enlarged(figures: PlanFigures, ranks: int, tables: int, name: Any) -> PlanFigures:
    """Return the figures as if they were of so many ranks and tables, with sizes of billions."""
    seconds = np.linspace(1e-3, 2e-3, ranks)
    vectors: dict[str, Any] = dict.fromkeys(("lookups", "rank_seconds", "lookup_seconds"), seconds)
    sizes: dict[str, Any] = dict.fromkeys(
        ("memory_bytes", "capacity_bytes"), (seconds * 1e12).astype(np.int64)
    )
    matrices: dict[str, Any] = dict.fromkeys(
        ("link_bytes", "link_seconds"), np.ones((ranks, ranks))
    )
    plan = figures.plan
    (memory,) = plan.memories
    memory = replace(memory, cost=replace(memory.cost, **vectors, **sizes, **matrices))
    big = np.full(tables, 2_500_000_000)
    return PlanFigures(
        replace(
            plan,
            tables=tuple(Table(name(n), 2_500_000_000) for n in range(tables)),
            topology=Topology.load(f"1x{ranks}-a100"),
            memories=(memory,),
        ),
        replace(
            figures.kinds,
            replicated=big,
            listed=big,
            striped=big,
            copies=big,
            memory_of_row=np.arange(tables, 0, -1),
            listed_accesses=big,
        ),
    )


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
    shown: PlanFigures, capsys: Capture, name: str, ranks: int, tables: int, verbose: bool
) -> None:
    print_plan(enlarged(shown, ranks, tables, NAMES[name]), "new", verbose)
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


def test_infeasible_plans_say_so_at_the_top(shown: PlanFigures, capsys: Capture) -> None:
    (memory,) = shown.plan.memories
    over = replace(
        memory.cost,
        memory_bytes=np.array([10, 10, 5_000, 10]),
        capacity_bytes=np.full(4, 1_000),
    )
    plan = replace(shown.plan, memories=(replace(memory, cost=over),))
    print_plan(PlanFigures(plan, shown.kinds), "new", False)
    head = one_line(capsys.readouterr().out.split("\n\n")[0])
    assert "INFEASIBLE rank 2 holds 4 kB more than its capacity" in head


def why_no_more(
    used: float = 0.0,
    limits: Limits | None = Limits(0.05),  # noqa: B008
    mode: str = "training",
    ranks: int = 4,
    full: float | None = None,
    seconds: float = 1.0,
) -> str:
    """Return the text on the copies of a plan with these figures."""
    cost = Cost.of_no_rows(np.full(ranks, 32e9))
    cost = replace(cost, extra_bytes=used, total_bytes=1.0, rank_seconds=np.full(ranks, seconds))
    certificate = Certificate(seconds, seconds, full_memory_bound_seconds=full)
    plan: Any = SimpleNamespace(
        ranks=ranks,
        limits=limits,
        cost=cost,
        memories=[SimpleNamespace(cost=cost, certificate=certificate, tables=(0,))],
        workload=SimpleNamespace(training=mode == "training"),
    )
    return copies_text(plan, copies(plan))


def test_why_copies_take_less_than_was_allowed() -> None:
    assert why_no_more() == (
        "none, though 5% of the tables' bytes were allowed: one would save less in reads than its "
        "gradients cost, or not fit"
    )
    some = why_no_more(mode="inference", used=0.01)
    assert some.startswith("they take 1% of the tables' bytes, though 5%")
    assert some.endswith("another would save no time, or not fit")
    assert why_no_more(used=0.0499).endswith("as much as was allowed")
    assert why_no_more(limits=Limits(0.0)) == "none, as none is allowed"
    assert why_no_more(limits=Limits(0.05, 0.2), full=0.99).endswith(
        "32 GB a rank, the transfer time would be at most 1.00% shorter"
    )
    assert why_no_more(ranks=1) == "none: there is one rank"
    assert why_no_more(limits=Limits(0.05, 0.2), seconds=0.5, full=0.4).endswith(
        "the transfer time would be at most 20.00% shorter"
    )


@pytest.mark.parametrize(
    ("now", "reason", "words"),
    [
        (0.001, ThresholdReason.BALANCED, "0.1%, where the ranks were even to 99.9%"),
        (0.00025, ThresholdReason.NO_GAIN, "halved from 0.1% to 0.025%, where "),
        (0.001, ThresholdReason.NO_GAIN, "0.1%, as halving it did not"),
        (1e-9, ThresholdReason.MOST_HALVINGS, "0.0000001%, the least that is"),
        (
            0.001,
            ThresholdReason.NOT_PLACED_BY_PARTITIONS,
            "0.1%, but this plan's rows were not",
        ),
    ],
)
def test_thresholds_as_asked_and_as_ended(now: float, reason: ThresholdReason, words: str) -> None:
    text = threshold_sentence(Threshold(asked=0.001, used=now, reason=reason, balance=0.999))
    assert words in text
    assert ("partitions of at most this share" in text) == ("but this plan's rows" not in text)


def test_reasons_of_thresholds_are_those_the_planner_gives(here: Path) -> None:
    found = set()
    for options in ("--threshold 50% --dob 100%", "--threshold 5% --dob 1%", "--threshold 0.01%"):
        command = f"plan p -o new --force --topology cpu:3 --mode inference {options} --json"
        found.add(ThresholdReason(json.loads(fine(*command.split()))["threshold_reason"]))
    assert {ThresholdReason.BALANCED, ThresholdReason.NO_GAIN} <= found


def used(link_bytes: Any, topology: Topology, balance: float = 0.2) -> str | None:
    ranks = topology.ranks
    cost = SimpleNamespace(
        link_bytes=np.array(link_bytes, dtype=np.float64),
        dob=Balance(1.0, 1.0, balance),
        rank_seconds=np.ones(ranks),
    )
    plan: Any = SimpleNamespace(
        ranks=ranks, host=None, topology=topology, cost_topology=topology, cost=cost
    )
    found = link_use(plan)
    return None if found is None else links_text(found)


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
    topology = Topology("t", (0,) * ranks, cost, 1.0, Latency.of_hops(0.0))
    text = used(moved, topology, 0.1)
    assert text is not None
    away = cost[~np.eye(ranks, dtype=bool)]
    differ = away.min() < away.max()
    assert ("3.00 times slower" in text) == differ
    assert ("10 B a pair of ranks, 20 B through fast ones" in text) == differ
