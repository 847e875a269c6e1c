"""Replan: plan again for newer counts, moving few rows of an older plan.

In: `Plan`, a newer `Profile`, a horizon. Out: `Replanned`, with the new `Plan` and its `RowMoves`.
Which rows move is decided in replan_one_memory.py. A plan with a tier is two such plans, and its
tables stay in the memory they are in (replan_with_tier.py). If tables, ranks, links or limits are
others, the old rows are carried over first (replan_changed.py). Whether that pays is judged on data
that neither plan was made from (judge.py), as `oper drift` does.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oper.base.defaults import HORIZON
from oper.base.errors import OperError, check_type
from oper.base.spoken import option
from oper.base.units import parse_bytes, parse_share, whole_number
from oper.files import manifest
from oper.plan.plan import MARKER, Plan, plan_given
from oper.planner.reference_figures import with_reference_figures
from oper.planner.replan.judge import JudgingData, judge
from oper.planner.replan.limited_moves import ALL_MOVES, MoveLimit
from oper.planner.replan.replan_changed import Wanted, replan_changed
from oper.planner.replan.replan_one_memory import Replanned, replan_one_memory
from oper.planner.replan.replan_with_tier import replan_with_tier
from oper.profiling.profile import Profile, profile_given
from oper.profiling.unknown_values import tell_unknown_values
from oper.tables.table import fingerprint
from oper.topology.topology import Topology


def replan(
    plan: Plan | Path | str,
    profile: Profile | Path | str,
    horizon: int = HORIZON,
    report: Callable[[str], None] = lambda step: None,
    *,
    topology: Topology | Path | str | None = None,
    extra_memory: float | None = None,
    max_move: int | str | None = None,
    curve: bool = False,
) -> Replanned:
    """Plan for the counts of `profile` by moving rows of `plan` if that pays within `horizon`
    iterations; `replanned.plan.save(folder)` writes the new plan, with the moves and the profile's
    vocabularies.

    Tables of the profile may have more rows than in the plan, the new ones at the end, and be new,
    and others may be gone; equal numbers must be the same rows. `topology` and `extra_memory` are
    the plan's if they are not given; rank r of another topology is rank r of the plan's. At most
    `max_move` bytes go over links: a number, a size such as "64MB", or a share of the tables' bytes
    such as "1%". `replanned.curve` has the results of other limits, if `curve` asks for it.

    Plan and profile may be given by their folders, and a topology by its name or file; the new
    plan's record has the digest of an old one's folder. `report` is called with the name of each
    step as it begins.

    Raises OperError if a table of the plan and the profile changed otherwise, `horizon` is below 1,
    the ranks cannot hold the tables, more than `max_move` has to move, or a plan with a tier is to
    have other tables, ranks or limits.
    """
    old, counts = plan_given("replan", "plan", plan), profile_given("replan", profile)
    digest = "" if isinstance(plan, Plan) else manifest.sha256(Path(plan) / MARKER)
    iterations = whole_number(horizon, "horizon")
    wanted = _wanted(old, topology, extra_memory)
    limit = MoveLimit(_most_bytes(max_move, old, counts), curve)
    made = plan_again(old, counts, wanted, iterations, limit, digest, report)
    tell_unknown_values(counts)
    report("data that no plan has seen")
    data = JudgingData.of(old.profile, made.plan.ranks, counts, None)
    first = made
    if data.made_from is not counts:
        limit = limit._replace(curve=False)
        first = plan_again(old, data.made_from, wanted, iterations, limit)
    judged = judge(old if first.carried_over is None else first.unmoved(), first, data)
    return replace(
        made,
        max_move_bytes=limit.most_bytes,
        plan=with_figures(made, counts),
        judgement=judged.judgement,
    )


def plan_again(
    old: Plan,
    counts: Profile,
    wanted: Wanted | None = None,
    horizon: int = HORIZON,
    limit: MoveLimit = ALL_MOVES,
    digest: str = "",
    report: Callable[[str], None] = lambda step: None,
) -> Replanned:
    """Replan as `replan` does, without the figures of other plans and a judgement. `wanted`: the
    old plan's, if None; `digest`: of the old plan's folder."""
    wanted = wanted or _wanted(old, None, None)
    same_tables = fingerprint(old.tables) == fingerprint(counts.tables)
    if same_tables and wanted.is_of(old):
        replan_parts = replan_with_tier if old.tier else replan_one_memory
        return replan_parts(old, counts, horizon, limit, digest, report)
    return replan_changed(old, counts, wanted, horizon, limit, digest, report)


def with_figures(made: Replanned, counts: Profile) -> Plan:
    """Return the new plan with the figures that it is compared with, its moves and the profile's
    vocabularies, which are saved with it."""
    companions = (counts.save_vocabularies, made.moves.save)
    new = with_reference_figures(made.plan, counts, [each.problem for each in made.fresh_parts])
    return replace(new, companions=companions, read_vocabularies=counts.prepared)


def _wanted(
    old: Plan, topology: Topology | Path | str | None, extra_memory: float | None
) -> Wanted:
    """Return the topology, settings and limits of the new plan: those of the old plan unless
    given."""
    ranks, asked = old.topology, old.asked
    if topology is not None:
        check_type("replan", "topology", topology, Topology, Path, str)
        new_topology = topology if isinstance(topology, Topology) else Topology.load(topology)
        ranks = ranks if new_topology.to_dict() == ranks.to_dict() else new_topology
    if extra_memory is not None:
        asked = replace(asked, extra_memory=extra_memory, reserve=None)
    keeps_limits = ranks is old.topology and extra_memory is None
    return Wanted(ranks, asked, old.limits if keeps_limits else None)


def _most_bytes(given: int | str | None, old: Plan, profile: Profile) -> float | None:
    """Return the bytes that a limit allows; a share is of the tables, with their optimizer's
    states."""
    if given is None:
        return None
    check_type("replan", "max_move", given, int, str)
    if not isinstance(given, str):
        if given < 0:
            raise OperError(f"max_move: expected at least 0 bytes, got {given}")
        return float(given)
    try:
        if given.rstrip().endswith("%"):
            share, mode = parse_share(given, "max_move"), old.workload.mode
            whole = sum(table.rows * table.memory_bytes(mode) for table in profile.tables)
            if share <= 1:
                return share * whole
        elif given.strip().isdigit() or given.rstrip()[-1:].isalpha():  # 0.05: of bytes, or of all?
            return float(parse_bytes(given, "max_move"))
    except OperError:
        pass  # The error below says what is expected.
    raise OperError(
        f"{option('--max-move', given)}: expected a size, such as 64MB, or a share of the tables' "
        "bytes, such as 1%"
    )
