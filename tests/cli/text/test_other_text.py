"""Output of `oper profile`, `replan`, `plan diff`, `plan check`, `topology show`, `simulate` and
`synth`."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from oper.analysis.plan_differences import ComparedPlan, PlanDifferences, TableDifference
from oper.cli.plan_commands.diff_text import diff_sentence, print_diff
from oper.cli.profile_commands.profile_text import print_profile
from oper.cli.replan_text import replan_sentence
from oper.cli.simulate import least_sent
from oper.cost.objective import Balance
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.replan.migration.migration_cost import Migration
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile_summary import AccessSummary, ProfileSummary
from oper.profiling.sampling import Sampled
from oper.scheduler.simulator import BatchTime, SimulatedRun, Simulation, SimulationSettings
from tests.support.commands import fine

Capture = pytest.CaptureFixture[str]
COUNTS = [field.name for field in fields(SimulatedRun)][3:-1]


@pytest.mark.parametrize(
    "command",
    [
        "topology show 2x4-a100",
        "topology show cpu:3",
        "topology show measured.yaml",
        "plan p --topology 1x2-a100 --mode inference --curve",
        "synth criteo-kaggle --scale 0.0001 --samples 50 -o new.parquet",
    ],
)
def test_numbers_have_no_exponents(here: Path, command: str) -> None:
    Path("measured.yaml").write_text(
        "node_of: [0, 1]\nbandwidth: [[1.0, 0.003], [12345678901234.0, 2]]\n"
        "allreduce_bandwidth: 1e-3\nlatency_seconds: 1e-12\ncapacity: [1e-7, 1234.5678]\n"
    )
    text = fine(*command.split())
    assert not re.search(r"\d[eE][-+]?\d", text), text
    assert max(map(len, text.splitlines())) <= 100
    assert ("the plan" in text) == ("--curve" in command)


def test_topologies_in_plain_words(here: Path) -> None:
    text = fine("topology", "show", "2x4-a100")
    assert text.startswith("2x4-a100: 8 ranks on 2 nodes, all ranks alike\n")
    for words in ("geneous", "s/byte"):
        assert words not in text


def moved(changed: int) -> Replanned:
    """A re-plan of that many rows, which says what a sentence needs."""
    links = np.array([[0.0, 2e6], [0.0, 5.0]])
    made: Any = SimpleNamespace(
        horizon=10_000,
        plan=SimpleNamespace(step_time=SimpleNamespace(seconds=1.5e-5)),
        migration=Migration(7, links),
        moves=SimpleNamespace(changed_rows=changed),
        carried_over=None,
        max_move_bytes=None,
    )
    return made


def test_replan_says_first_how_long_a_step_takes_and_what_moves() -> None:
    assert replan_sentence(moved(7), "old", "new", "w@1") == (
        "new, made for w@1: a step takes 15 µs (predicted), for moving 2 MB once; each move pays "
        "off within 10,000 steps (--horizon)"
    )
    assert replan_sentence(moved(0), "old", "new", "w@1") == (
        "new, made for w@1: a step takes 15 µs (predicted); nothing moves, as no move pays off "
        "within 10,000 steps (--horizon)"
    )


def test_check_says_first_whether_all_holds(here: Path) -> None:
    lines = fine("plan", "check", "q").splitlines()
    assert lines[0] == "q: all 12 invariants hold"
    assert len(lines) == 13


def differing(tables: list[TableDifference]) -> PlanDifferences:
    def compared(figure: float) -> ComparedPlan:
        return ComparedPlan(
            profile="p",
            ranks=4,
            workload=Workload("training", "raw"),
            asked=PlanSettings(),
            limits=None,
            tier=[],
            objective_seconds=figure,
            extra_memory_ratio=figure,
            memory_bytes=int(figure),
            communication_bytes=figure,
            threshold=figure,
            dob=Balance(1.0, 1.0, 1.0),
        )

    return PlanDifferences(compared(2.0), compared(3.0), 1000, tables)


def difference(table: str, rows: int) -> TableDifference:
    return TableDifference(table, rows, rows, rows, rows, 64 * rows)


def test_differences_first_in_a_sentence_then_of_the_figures() -> None:
    none = differing([])
    assert diff_sentence(none, "q", "r") == "r holds every row where q does"
    found = diff_sentence(differing([difference("C1", 10)]), "q", "r")
    assert found == "r holds 10 of 1,000 rows on other ranks than q, or on more or fewer (640 B)"


@pytest.mark.parametrize("name", ["table_with_sixty_characters_" + 32 * "x", 20 * "表格"])
def test_differences_of_many_tables_keep_100_columns(capsys: Capture, name: str) -> None:
    print_diff(differing([difference(f"{name}{n}", 2_500_000_000) for n in range(856)]), "q", "r")
    text = capsys.readouterr().out
    assert "and 836 more tables" in text
    assert "+50.00%" in text
    assert max(map(cell_len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", ["table_with_sixty_characters_" + 32 * "x", 20 * "表格"])
def test_profiles_of_many_tables_keep_100_columns(capsys: Capture, name: str) -> None:
    def table(name: str) -> AccessSummary:
        return AccessSummary(name, 2_500_000_000, 9_999_999_999, 0, 1e-9, True, "vocab")

    summary = ProfileSummary(
        samples=10**13,
        whole=table("all"),
        tables=tuple(table(f"{name}{n}") for n in range(856)),
        counter_bytes=8,
        left_out={},
        skipped_ids={},
        unknown_accesses={f"{name}0": 1_234_567},
        sampled=Sampled(1e-7),
    )
    print_profile("p", summary)
    text = capsys.readouterr().out
    assert "816 more" in text
    assert max(map(cell_len, text.splitlines())) <= 100
    assert not re.search(r"\d[eE][-+]?\d", text), text


@pytest.mark.parametrize("more", [[], ["--hold-out", "20%"], ["--windows", 24]], ids=str)
def test_a_new_profile_takes_at_most_15_lines(here: Path, more: list[object]) -> None:
    random = np.random.default_rng(0)
    columns: Any = {f"C{n}": random.integers(0, 9 * n + 9, 600) for n in range(30)}
    columns["C7"] = [random.integers(0, 9, n % 5).tolist() for n in range(600)]
    columns["C3"][5] = -3
    pq.write_table(pa.table(columns), "many.parquet")
    text = fine("profile", "many.parquet", "-o", "many", "--on-bad-id", "skip", *more)
    lines = text.splitlines()
    assert len(lines) <= 15, text
    assert max(map(len, lines)) <= 100
    assert "… 26 more" in text
    assert "skipped ids         1 of 1 table" in text
    after = {line[:20].strip(): line[20:] for line in lines}
    whole = fine(*after["see each table"].split()[1:])
    assert len(whole.splitlines()) > 30
    assert "skipped ids         1 of table C3" in whole
    assert all(f"C{n} " in whole for n in range(30))
    if "--windows" in more:
        assert "… 23 more" in text
        assert all(f"@{n} " in whole for n in range(24))
    command = after["plan from it"].replace("NAME", "cpu:2")
    fine(*command.split()[1:])


def test_bytes_between_ranks_are_printed_if_asked_for(here: Path) -> None:
    command = "replan q w@1 -o new --topology 1x8-a100 --extra-memory 0 --force"
    text, verbose = fine(*command.split()), fine(*command.split(), "-v")
    assert len(text.splitlines()) <= 15
    assert verbose.startswith(text)
    assert len(verbose.splitlines()) == len(text.splitlines()) + 10
    assert "to \\ from" in verbose


def test_simulations_name_what_sends_the_least() -> None:
    def simulation(totals: dict[str, tuple[int, int]]) -> Simulation:
        none = dict.fromkeys(COUNTS, 0)
        runs = {}
        for name, (total, wrong) in totals.items():
            counts: Any = {**none, "miss_pull": total, "wrong_reads": wrong}
            counts |= {"reads": 10_000, "most_lag": 7 if wrong else 0}
            policy, sync = name.split("+")
            runs[name] = SimulatedRun(policy, sync, "lru", **counts, dispatch=BatchTime(0, 0, 0))
        return Simulation(SimulationSettings(), 1, (1,), 1, runs)

    totals = {"random+bsp": (100, 0), "laia+bsp": (80, 0), "esd+bsp": (90, 0)}
    assert (
        least_sent(simulation(totals)) == "Least is sent by laia bsp: 20.0% less than by random bsp"
    )
    totals["random+bsp"] = (10, 0)
    assert least_sent(simulation(totals)) == "Least is sent by random bsp, the first"
    nothing = dict.fromkeys(totals, (0, 0))
    assert least_sent(simulation(nothing)).endswith("random bsp, the first")
    # One that is not exact is no winner, is named with its risk, and is not what others save of.
    stale = {"esd+het:3": (50, 1234), "random+bsp": (100, 0), "laia+bsp": (80, 0)}
    assert least_sent(simulation(stale)) == (
        "Least is sent by laia bsp: 20.0% less than by random bsp. esd het:3 sends 37.5% less than "
        "that, and 12.3% of its reads lack an update, up to 7 of them"
    )
    lucky = {"random+bsp": (100, 0), "laia+het-exact:3": (80, 0)}
    assert least_sent(simulation(lucky)) == (
        "Least is sent by random bsp, the first, of the exact ones. laia het-exact:3 sends 20.0% "
        "less than that, and no read lacked an update here, which nothing guarantees"
    )
    assert least_sent(simulation({"laia+het:3": (80, 1), "esd+het:3": (90, 0)})) == (
        "None is exact; least is sent by laia het:3, and 0.0% of its reads lack an update, up to 7 "
        "of them"
    )
