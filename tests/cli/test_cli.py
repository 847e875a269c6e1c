"""The command line as a user meets it: what it prints, what it warns of, and extreme counts."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper import cli
from oper.base.errors import OperError
from oper.base.formatting import format_bytes, format_gap, format_number, plural
from oper.base.units import parse_share
from oper.profiling.profile import Profile
from oper.tables.table import Table
from tests.support.commands import SYNTH, fine, oper, refused

# What each command prints

COMMANDS = (
    "profile log.parquet -o new --columns C*",
    "profile log.parquet -o new --columns C* --windows 3",
    "profile log.parquet -o new --columns C* --batch-size 100 --ranks 2",
    "profiles show p",
    "profiles show w",
    "profiles show w@1 --check",
    "profiles merge w@0 w@1 -o new",
    f"{SYNTH} -o new.parquet",
    f"{SYNTH} -o new --counts --windows 2",
    "topology show 4x4-a100",
    "plan p -o new --topology 2x2-a100 --threshold 1% --extra-memory 0.1",
    "plan w@1 -o new --topology cpu:20 --mode inference --balance link",
    "plan show q",
    "plan explain q --table C1 --row 0",
    "plan explain q --table C1 --row 89",
    "plan diff q r",
    "plan check q",
    "plan check q log.parquet",
    "compare p --topology 2x2-a100 --extra-memory 0,5% --methods oper,table_wise,row_wise",
    "compare p --topology cpu:2 --threshold 5% --methods oper,paper,milp --time-limit 1",
    "drift q w@1",
    "replan q w@1 -o new",
    "simulate log.parquet --columns C* --workers 2 --batch-size 16 --cache 90% --warm-up 1",
    "simulate log.parquet --columns C* --workers 4 --batch-size 16 --cache 90% --warm-up 1 "
    "--policy random,laia:1,esd:0.5,grouped --sync bsp,peer,het,het:3,het-exact:inf "
    "--evict lru,emark --links 5,5,1,1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_and_nothing_else(here: Path, command: str) -> None:
    said = oper(*command.split(), "--json")
    assert said.status == 0, said
    assert isinstance(json.loads(said.out), dict)


@pytest.mark.parametrize("command", COMMANDS)
def test_text_has_at_most_100_columns(here: Path, command: str) -> None:
    said = oper(*command.split())
    assert said.status == 0, said
    lines = said.out.splitlines()
    assert lines
    assert max(map(len, lines)) <= 100
    assert not re.search(r"\b1 (rows|tables|ranks|nodes|exchanges|samples)\b", said.out)
    assert "\x1b" not in said.out


@pytest.mark.parametrize("name", ["-lead/a b", "it's"])
def test_printed_commands_can_be_typed(here: Path, name: str) -> None:
    """With dashes, spaces and quotes in the names of folders."""
    said = fine("profile", "log.parquet", "--columns", "C*", "-o", f"./{name}")
    assert fine(*printed_command(said, "see each table"))
    plan = printed_command(said, "plan from it")
    said = fine(*plan[:-1], f"./{name} plan", "--topology", "cpu:2")
    assert fine(*printed_command(said, "see each rank"))
    fine(*printed_command(said, "explain it"))
    assert Path(f"./{name} plan.html").exists()


def printed_command(text: str, label: str) -> list[str]:
    """Return the words after `oper` of a command that a text shows after a label."""
    (line,) = (line for line in text.splitlines() if line.startswith(label))
    first, *words = shlex.split(line.removeprefix(label))
    assert first == "oper"
    return words


PLAN_FIELDS = {
    *("plan", "mode", "ranks", "rows", "threshold", "extra_memory_ratio", "asked", "seconds"),
    *("memory_bytes", "lookups", "lookup_seconds", "link_bytes", "link_seconds"),
    *("gradient_lookup_seconds", "gradient_link_seconds", "allreduce_seconds", "allreduce_method"),
    *("rank_seconds", "communication_bytes", "dob", "objective_seconds", "lower_bound_seconds"),
    *("certified_gap", "feasible", "status", "allreduce_memory_bytes"),
}


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_fields_of_a_plan(here: Path, mode: str) -> None:
    """The names are promised, and what they mean can be checked by adding up."""
    command = ["plan", "p", "-o", "new", "--topology", "2x2-a100", "--mode", mode]
    said = json.loads(fine(*command, "--extra-memory", "10%", "--json"))
    assert set(said) >= {*PLAN_FIELDS, "mailbox_bytes"}
    served = json.loads(fine(*command, "--force", "--mode", "inference", "--json"))
    assert said["mailbox_bytes"] >= served["mailbox_bytes"] > 0  # on devices; on CPU ranks:
    on_cpu = json.loads(
        fine("plan", "p", "-o", "cpu", *command[4:], "--topology", "cpu:2", "--json")
    )
    assert (on_cpu["mailbox_bytes"] > 0) == (mode == "training")
    assert (said["plan"], said["mode"], said["ranks"], said["rows"]) == ("new", mode, 4, 130)
    assert said["asked"]["extra_memory"] == 0.1
    assert said["asked"]["threshold"] == 0.001
    assert 0 <= said["extra_memory_ratio"] <= 0.1
    assert 0 < said["threshold"] <= 0.001
    assert said["seconds"]["total"] > 0
    per_rank = ("memory_bytes", "lookups", "lookup_seconds", "rank_seconds")
    assert all(np.shape(said[name]) == (4,) for name in per_rank)
    assert np.shape(said["link_bytes"]) == np.shape(said["link_seconds"]) == (4, 4)
    assert set(said["communication_bytes"]) == {"fetch", "gradient", "allreduce", "total"}
    parts = (said["communication_bytes"][name] for name in ("fetch", "gradient", "allreduce"))
    assert sum(parts) == pytest.approx(said["communication_bytes"]["total"])
    assert said["communication_bytes"]["fetch"] == pytest.approx(np.sum(said["link_bytes"]))
    assert set(said["dob"]) == {"memory", "lookups", "link_cost"}
    links, gradients = (np.array(said[name]) for name in ("link_seconds", "gradient_link_seconds"))
    seconds = np.array(said["lookup_seconds"]) + links.sum(axis=1)
    seconds += np.array(said["gradient_lookup_seconds"]) + gradients.sum(axis=1)
    seconds += np.array(said["allreduce_seconds"])
    np.testing.assert_allclose(seconds, said["rank_seconds"])
    assert said["objective_seconds"] == max(said["rank_seconds"])
    gap = said["objective_seconds"] / said["lower_bound_seconds"] - 1
    assert said["certified_gap"] == pytest.approx(gap, abs=1e-12)
    assert (said["feasible"], said["status"]) == (True, "ok")


def test_fields_of_a_comparison(here: Path) -> None:
    methods = "oper,paper,memory_greedy,access_greedy,table_wise,row_wise"
    command = ["compare", "p", "--topology", "cpu:2", "--methods", methods, "--json"]
    runs = json.loads(fine(*command, "--threshold", "5,1%"))["runs"]
    assert [run["settings"]["threshold"] for run in runs] == [0.05, 0.01]
    for run in runs:
        assert list(run["methods"]) == methods.split(",")
        for entry in run["methods"].values():
            assert set(entry) >= PLAN_FIELDS - {"plan"}


def test_help_shows_the_options_of_default_verbs() -> None:
    top = fine("--help")
    places = [top.index(f"\n  {name} ") for name in cli.VERBS]
    assert places == sorted(places)
    assert not re.search(r"[a-z,;]\.\.\.\n", top), "a summary is cut off"
    for verb, words in (
        ("profile", ("LOG...", "--output", "--columns")),
        ("profiles", ("show", "merge")),
        ("plan", ("--topology", "--extra-memory", "explain")),
    ):
        for flag in ("--help", "-h"):
            text = fine(verb, flag)
            assert all(word in text for word in words)
    assert fine("--version").startswith("oper ")


def test_a_log_may_have_the_name_of_a_command(here: Path) -> None:
    for name in ("show", "merge", "make"):
        Path("log.parquet").rename(name)
        fine("profile", name, "-o", f"of-{name}", "--columns", "C*")
        Path(name).rename("log.parquet")


def test_figures_for_people() -> None:
    assert [format_number(v) for v in (0, 12, 999.6, 1234567)] == ["0", "12", "1k", "1.23M"]
    assert [format_bytes(v) for v in (0, 999, 999_999, 1.5e15)] == [
        "0 B",
        "999 B",
        "1 MB",
        "1.5 PB",
    ]
    shown = [format_gap(v) for v in (0.0, 9e-7, 1.0001e-4, 0.0123, 1.5)]
    assert shown == ["<0.0001%", "<0.0001%", "0.0101%", "1.23%", "150%"]
    assert [plural(n, "rank") for n in (1, 2000)] == ["1 rank", "2,000 ranks"]
    assert [parse_share(t, "--dob") for t in ("5%", "0.05", "300%")] == [0.05, 0.05, 3]
    for text in ("5", "x", "-1%", "nan", "", "%"):
        with pytest.raises(OperError, match="--dob"):
            parse_share(text, "--dob")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan p -o new --topology cpu:1", ["one rank", "--extra-memory"]),
        (
            "plan p -o new --topology cpu:2 --fetch distinct --batch-size 2",
            ["--fetch distinct", "no effect"],
        ),
        (
            "plan measured -o new --topology cpu:2 --batch-size 64",
            ["100 on 2 ranks", "64 on 2", "--batch-size 64 --ranks 2"],
        ),
        ("profile log.parquet -o new --columns C* --every 2d", ["--every", "--by-column"]),
        ("profile log.parquet -o new --columns C* --seed 2", ["--seed", "--sample"]),
    ],
)
def test_options_without_effect_warn(here: Path, command: str, words: list[str]) -> None:
    measured = "profile log.parquet -o measured --columns C* --batch-size 100 --ranks 2"
    fine(*measured.split())
    said = oper(*command.split(), "--json")
    assert said.status == 0
    assert json.loads(said.out)
    assert said.errors.startswith("warning: ")
    assert all(word in said.errors for word in words), said.errors


QUIET_WRITES = (
    "profile log.parquet -o new --columns C* --seed 2",
    "profile log.parquet -o new",  # which says what it leaves out
    "profiles merge w@0 w@1 -o new",
    f"{SYNTH} -o new.parquet",
    f"{SYNTH} -o new --counts --windows 2",
    "plan p -o new --topology cpu:1",
    "replan q w@1 -o new",
)


@pytest.mark.parametrize("command", QUIET_WRITES)
@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_commands_that_write_print_nothing(here: Path, command: str, flag: str) -> None:
    said = oper(*command.split(), flag)
    assert said == (0, "", "")
    assert list(here.glob("new*"))
    assert fine(*command.split(), "--force"), "not quiet for the next command"


def test_quiet_commands_print_results_and_errors(here: Path) -> None:
    for command in ("profiles show p", "plan show q", "plan diff q r", "drift q w@1"):
        assert fine(*command.split(), "-q") == fine(*command.split())
    curve = "plan p --topology 2x2-a100 --curve"
    assert fine(*curve.split(), "-q") == fine(*curve.split())
    assert json.loads(fine("plan", "p", "-o", "new", "--topology", "cpu:2", "-q", "--json"))
    assert oper("plan", "show", "absent", "-q").errors.startswith("error: absent")


def test_a_quiet_check_prints_its_result_and_what_is_wrong(here: Path) -> None:
    assert fine("plan", "check", "q", "-q").splitlines() == [
        fine("plan", "check", "q").splitlines()[0]
    ]


def test_quiet_hides_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from oper.cli.shared import progress
    from oper.cli.shared.console import quietly

    class Terminal:
        is_terminal = True

    monkeypatch.setattr(progress, "Console", lambda **_: Terminal())
    monkeypatch.setattr(progress, "Progress", lambda *_, **__: pytest.fail("a bar was shown"))
    with quietly(True), progress.progress("counting", 1) as meter, progress.steps("x", 1) as step:
        meter.advance(1)
        step("done")


def test_no_warning_where_all_is_well(here: Path) -> None:
    assert not oper("plan", "p", "-o", "new", "--topology", "cpu:2", "--fetch", "distinct").errors


# Extremes that are no mistakes


def save_profile(place: str, accesses: list[int], dtype: Any, samples: int) -> None:
    counts = np.array(accesses, dtype=dtype)
    tables = (Table("only", 1), Table("many", len(counts) - 1, dim=16))
    none = np.zeros(0, dtype)
    Profile(tables, samples, counts, none, (False, False), source={}).save(place)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize(
    ("accesses", "dtype", "samples"),
    [
        pytest.param([0] * 40, np.uint32, 100, id="nothing-accessed"),
        pytest.param([50, *[0] * 39], np.uint32, 100, id="a-table-never-accessed"),
        pytest.param([5, 10_000_000, *[1] * 38], np.uint32, 10_000_000, id="one-hot-row"),
        pytest.param([2**32 - 1] * 40, np.uint32, 2**32 - 1, id="full-counters"),
        pytest.param([2**50] * 40, np.uint64, 2**50, id="wide-counters"),
    ],
)
def test_extreme_counts(
    here: Path, mode: str, accesses: list[int], dtype: Any, samples: int
) -> None:
    save_profile("extreme", accesses, dtype, samples)
    for topology in ("cpu:1", "2x2-a100"):
        options = ("--force", "--topology", topology, "--mode", mode, "--extra-memory")
        for extra in (0, "300%"):
            said = json.loads(fine("plan", "extreme", "-o", "new", *options, extra, "--json"))
            assert said["feasible"]
            assert said["extra_memory_ratio"] <= said["asked"]["extra_memory"]
            assert said["certified_gap"] >= -1e-12
            fine("plan", "check", "new")
        fine("plan", "show", "new")
        fine("drift", "new", "extreme")
        fine("replan", "new", "extreme", "-o", "again", "--force")


def test_counters_that_overflow_when_they_are_added(here: Path) -> None:
    save_profile("most", [2**61, 2**60], np.uint64, 2**61)
    fine("profiles", "show", "most")
    refused("profiles merge most most -o new", "merging", "at most")
    save_profile("more", [2**63, 1], np.uint64, 2**62)
    refused("profiles show more", "more/accesses.npy", "at most")
    save_profile("full", [2**32 - 1, 7], np.uint32, 2**32 - 1)
    merged = json.loads(fine("profiles", "merge", "full", "full", "-o", "new", "--json"))
    assert merged["accesses"] == 2 * (2**32 - 1 + 7)
    assert merged["counter_bytes"] == 8
