"""Output of `oper compare`: the first table, the sentences around it, and the details."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cli.compare_text import held_out_verdict, print_runs, remarks, verdict
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.reference_figures import HeldOutSource
from oper.plan.settings import PlanSettings
from oper.planner.baselines.baseline import PooledBytes, SolverNotes, Status, TorchRecNotes
from oper.planner.baselines.registry import BASELINES
from oper.planner.compare import Comparison, HeldOutData, MethodResult, compare
from oper.topology.topology import Topology
from tests.support.planner.profiles import make_profile

QUICK = ("oper", *(name for name, rule in BASELINES.items() if rule.quick is not None))
Capture = pytest.CaptureFixture[str]


def run(
    seed: int, mode: str = "training", methods: tuple[str, ...] = QUICK, extra: float = 0.05
) -> Comparison:
    return compare(
        make_profile(seed, rows=(9000, 40, 7)),
        Topology.load("2x2-a100"),
        Workload(mode, "raw", 256),  # type: ignore[arg-type]
        PlanSettings(extra_memory=extra, threshold=0.02),
        methods,
    )


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return run(1)


def printed(capsys: Capture, runs: list[Comparison], verbose: bool = False) -> str:
    print_runs(runs, "profile", verbose)
    return capsys.readouterr().out


def row_of(text: str, method: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{method} "))


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("verbose", [False, True])
def test_at_most_100_columns_and_no_joined_numbers(
    capsys: Capture, mode: str, verbose: bool
) -> None:
    text = printed(capsys, [run(seed, mode) for seed in range(2)], verbose)
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in QUICK)
    assert not re.search(r"[\d.]/[\d.]", text), "numbers with a stroke between them"
    assert not re.search(r"[ /]\.\d", text), "a number without its first 0"
    assert not re.search(r"\de[-+]?\d", text)


def test_what_was_compared_comes_first_and_the_best_last(
    capsys: Capture, compared: Comparison
) -> None:
    text = printed(capsys, [compared])
    first, verdicts = text.split("\n\n")[0], text.split("\n\n")[1]
    for words in ("2x2-a100", "training", "raw fetches", "256 samples", "5% of extra memory"):
        assert words in first.replace("\n", " ").replace("  ", " "), first
    assert f"{len(QUICK)} methods" in first
    assert "Best: " in verdicts
    assert "Certified: oper's transfer time" in verdicts
    header = next(line for line in text.splitlines() if line.startswith("method"))
    names = ("method", "step", "times oper's", "fits its memory", "fullest rank", "planning")
    assert re.split(r"\s{2,}", header) == list(names)


def test_times_are_oper_s_and_only_misfits_have_a_factor_of_memory(
    capsys: Capture, compared: Comparison
) -> None:
    def over(factor: float) -> MethodResult:
        result = compared.methods["table_wise"]
        assert result.cost is not None
        room = np.full(result.cost.ranks, 10**9)
        held = np.rint(factor * room).astype(np.int64)
        cost = replace(result.cost, memory_bytes=held, capacity_bytes=room)
        return replace(result, status=Status.INFEASIBLE, cost=cost, certificate=None)

    mine = compared.methods["oper"].step_seconds
    assert mine is not None
    methods = compared.methods | {
        "row_wise": timed(compared.methods["row_wise"], 1.3512 * mine),
        "table_wise": over(2.4759),
        "paper": replace(compared.methods["paper"], certificate=None),
    }
    text = printed(capsys, [replace(compared, methods=methods)])
    assert " 1.35 " in row_of(text, "row_wise")
    assert " 1.00 " in row_of(text, "oper")
    assert "no: 2.48x its memory" in row_of(text, "table_wise")
    assert "no: too many copies" in row_of(text, "paper")
    for name in set(QUICK) - {"table_wise", "paper"}:
        assert " yes " in row_of(text, name)
    barely = replace(compared, methods=methods | {"table_wise": over(1.000021)})
    assert "no: 1.00002x its memory" in row_of(printed(capsys, [barely]), "table_wise")


def test_methods_without_a_plan_say_why(capsys: Capture, compared: Comparison) -> None:
    late, none = (
        MethodResult(status, 0.02, {"total": 1.0}, reason=f"because {status}")
        for status in (Status.TIME_LIMIT, Status.INFEASIBLE)
    )
    found = replace(compared, methods=compared.methods | {"paper": late, "row_wise": none})
    for verbose in (False, True):
        text = printed(capsys, [found], verbose)
        assert "no plan in time" in row_of(text, "paper")
        assert "no plan " in row_of(text, "row_wise")
        assert "in time" not in row_of(text, "row_wise")
        assert "paper: because time_limit" in text
        assert "row_wise: because infeasible" in text


def timed(result: MethodResult, seconds: float) -> MethodResult:
    """The result, as if its step took so many seconds, and its transfers half as many."""
    assert result.cost is not None
    cost = replace(result.cost, rank_seconds=np.full(result.cost.ranks, seconds / 2))
    return replace(result, cost=cost, step_seconds=seconds)


def fake(seconds: float, gap: float | None = 0.0) -> MethodResult:
    cost = Cost.of_no_rows(np.array([1.0, 1.0]))
    certificate = None if gap is None else Certificate(seconds, seconds / (1 + gap))
    result = MethodResult(Status.OK, 0.02, {"total": 1.0}, cost=cost, certificate=certificate)
    return timed(result, seconds)


def among(compared: Comparison, **methods: MethodResult) -> Comparison:
    return replace(compared, methods=methods)


NOT_MEASURED = "Not measured on data the plan has not seen: `oper profile --hold-out 20%` would"


@given(st.lists(st.tuples(st.floats(1e-6, 1e-3), st.booleans()), min_size=1, max_size=6))
def test_the_best_is_the_fastest_that_fits(
    compared: Comparison, drawn: list[tuple[float, bool]]
) -> None:
    methods = {f"m{n}": fake(s, 0.0 if fits else None) for n, (s, fits) in enumerate(drawn)}
    lines = verdict(among(compared, **methods))
    fitting = sorted((s, n) for n, (s, fits) in enumerate(drawn) if fits)
    if not fitting:
        assert lines == ["No method fits: none has a plan within the limits"]
        return
    assert lines[0].startswith(f"Best: m{fitting[0][1]}, ")
    if len(fitting) > 1:
        assert f"; m{fitting[1][1]}, the next that fits, takes " in lines[0]
        longer = fitting[1][0] / fitting[0][0] - 1
        assert ("takes as long" in lines[0]) == (longer < 5e-5)
    assert lines[1:] == [NOT_MEASURED]  # without OPER nothing is certified


def test_oper_need_not_be_the_best(compared: Comparison) -> None:
    lines = verdict(among(compared, oper=fake(1.1e-5, 0.02), milp=fake(1e-5)))
    assert lines[0] == "Best: milp, 10 µs a step; oper, the next that fits, takes 10.00% longer"
    assert "at most 2% longer than that of any placement" in lines[1]
    assert "less than 0.0001% longer" in verdict(among(compared, oper=fake(1.0, 0.0)))[1]


@pytest.mark.parametrize(
    ("later", "words"), [(1e-5, "row_wise takes as long"), (1.5e-5, "row_wise takes 50.00% longer")]
)
def test_held_out_steps_are_compared(compared: Comparison, later: float, words: str) -> None:
    methods = {
        name: replace(fake(1e-5), held_out_step_seconds=seconds)
        for name, seconds in (("oper", 1e-5), ("row_wise", later))
    }
    data = HeldOutData(HeldOutSource.LAST_PART, 9, 1e-6)
    said = held_out_verdict(replace(compared, methods=methods, held_out=data))
    assert said.endswith(f" oper takes 10 µs a step, the least of those priced; {words}")


def test_sweeps_name_what_differs(capsys: Capture, compared: Comparison) -> None:
    more = run(1, extra=0.1)
    text = printed(capsys, [compared, more])
    assert re.search("With 5% of extra memory for copies, at most [0-9.]+ .?B a rank:", text)
    assert re.search("With 10% of extra memory for copies, at most [0-9.]+ .?B a rank:", text)
    finer = replace(compared, asked=replace(compared.asked, threshold=0.001))
    assert "a rank, partitions of at most 0.1%:" in printed(capsys, [compared, finer])


def test_remarks_of_torchrec_and_the_solver() -> None:
    notes = TorchRecNotes(
        capacity_factor=4.0,
        estimate_seconds=3.79e-9,
        plan_seconds=1.0,
        tables={"row_wise": 3, "table_wise": 23},
        pooled_bytes=PooledBytes(1e6, 0.0, 0.0, 0.0),
    )
    solver = SolverNotes(12, 0.001, 0.9)
    methods = {
        "torchrec": replace(fake(1.0), notes=notes),
        "milp": replace(fake(1.0), notes=solver),
    }
    lines = remarks(methods, True)
    assert lines[0] == (
        "torchrec: its planner shards tables 3 row_wise, 23 table_wise, found when it was told of "
        "4.00x the memory"
    )
    assert "3.79 ns" in lines[1]
    assert "1 MB of pooled vectors" in lines[1]
    assert "HiGHS placed 12 partitions" in lines[2]


def test_what_devices_hold_is_the_limit_only_where_no_memory_was_asked_for(
    capsys: Capture, compared: Comparison
) -> None:
    held = compare(
        make_profile(1, rows=(9000, 40, 7)),
        Topology.load("2x2-a100"),
        Workload("training", "raw", 256),
        PlanSettings(),
        ("row_wise",),
    )
    assert "of memory a rank" in " ".join(printed(capsys, [held]).split())
    assert "of memory a rank" not in " ".join(printed(capsys, [compared]).split())
