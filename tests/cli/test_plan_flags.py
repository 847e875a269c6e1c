"""Flags that plan again as an existing plan was planned: the command, run as it is printed."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.spoken import by_command_line
from oper.base.units import parse_share
from oper.cli.judgement_text import command_to_run
from oper.cli.plan_flags import _typed_share, plan_flags
from oper.plan.plan import Plan
from oper.planner.replan.judgement import Choice
from tests.support.commands import fine, tree
from tests.support.planner.judgements import a_judgement

LINKS = """
name: my links
node_of: [0, 0, 1, 1]
bandwidth: {local: 4.0e+9, same_node: 1.0e+8, other_node: 5.0e+7}
allreduce_bandwidth: 3.0e+9
latency_seconds: 1.0e-9
"""


def again(words: str) -> Plan:
    """Return the plan that the words of a command make, and run it."""
    fine(*shlex.split(words.removeprefix("oper ").replace("NEW", "again")), "--force")
    return Plan.load("again")


@pytest.mark.parametrize(
    "asked",
    [
        "--topology dgx-a100",
        "--topology 1x2-a100 --mode inference --capacity 1.3 --extra-memory 700%",
        "--topology 2x2-a100 --fetch raw --batch-size 512 --extra-memory 7% --threshold 1.5%",
        "--topology 2x2-a100 --fetch distinct --dob 0.123456789 --balance link",
        "--topology cpu:2 --capacity 10MB,20MB",
        "--topology 1x2-a100 --reserve 30% --tier C1",
        "--topology cpu:2 --fetch distinct --extra-memory 0.0712345678",
    ],
)
def test_the_flags_make_the_plan_again(here: Path, asked: str) -> None:
    fine("plan", "p", *asked.split(), "-o", "made")
    flags = plan_flags(Plan.load("made"))
    assert flags.unsaid == ()
    again(f"plan p {flags.typed} -o NEW")
    assert tree(here / "again") == tree(here / "made")


def test_the_file_of_a_topology_is_named(here: Path) -> None:
    Path("links.yaml").write_text(LINKS)
    fine("plan", "p", "--topology", "links.yaml", "--capacity", "1.5", "-o", "made")
    flags = plan_flags(Plan.load("made"))
    assert flags.unsaid == ("FILE is the file of the topology called 'my links'",)
    again(f"plan p {flags.typed.replace('FILE', 'links.yaml')} -o NEW")
    assert tree(here / "again") == tree(here / "made")


def test_the_advice_is_run_as_it_is_printed(here: Path) -> None:
    asked = "plan p --topology 1x2-a100 --mode inference --reserve 10% -o made"
    fine(*asked.split())
    made = Plan.load("made")
    judgements = {
        Choice.FROM_SCRATCH: a_judgement(1.2e-5, 1.1e-5, 1e-5),
        Choice.FULL_COPIES: a_judgement(1.2e-5, 1.1e-5, 1e-5, 5e-6),
    }
    for choice, judgement in judgements.items():
        assert judgement.advice == choice
        with by_command_line():
            command = command_to_run(judgement, made, "made", "p")
        assert command is not None
        plan = again(command.removeprefix("Run: "))
        assert (plan.workload, plan.topology.name) == (made.workload, made.topology.name)
        if choice == Choice.FULL_COPIES:
            assert plan.asked.extra_memory == 1
        else:
            assert plan.asked == made.asked


@given(st.floats(0, 1))
def test_shares_are_typed_exactly(share: float) -> None:
    assert parse_share(_typed_share(share), "share") == share
