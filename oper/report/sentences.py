"""Sentences on a plan's figures, for readers who have not seen oper before."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from oper.analysis.plan_facts import CopiesLimit, copies, fit
from oper.analysis.wording import (
    bound_note,
    fetching,
    held_out_sentence,
    hot_row,
    simple_plans_compared,
    unread_sentence,
)
from oper.base.arrays import Floats
from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_factor,
    format_gap,
    format_share,
    plural,
)
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RowsByKind
from oper.planner.compare import Comparison
from oper.planner.memory_curve import CurvePoint
from oper.report.charts.comparison_charts import NAMES, beside, next_best

_NOTICED = 5e-5  # a share below it prints as 0.00%
_EVEN = 1e-3  # ranks or links that differ by less are called even
_PLACED_BY = {
    "homes": "pooled tables on their homes: the rest of each table on as few nodes as pays",
    "greedy": "OPER's own procedure: rows of similar frequency together, then rows swapped",
    "programme": "a linear programme, as the ranks differ, and then rows swapped",
    "integer programme": "an integer programme, as the problem is small",
    "replan": "re-planning an older plan: only rows whose move pays were moved",
}


def headline(plan: Plan, run: Comparison | None) -> list[str]:
    """Return sentences on the placement, the predicted step, each gain once, the distance from
    optimal, and the step on data that the plan has not seen."""
    unread = unread_sentence(plan)
    return [
        _placed(plan),
        *_times(plan, run),
        optimality(plan),
        f"{held_out_sentence(plan.held_out)}.",
        *([] if unread is None else [f"{unread}."]),
    ]


def _placed(plan: Plan) -> str:
    rows, workload, topology = int(plan.layout.rows.sum()), plan.workload, plan.topology
    nodes = f"{plural(topology.nodes, 'node')}, " if topology.nodes > 1 else ""
    tier = f", {plural(len(plan.tier), 'table')} of them in the hosts' memory" if plan.tier else ""
    if len(plan.tier) == len(plan.tables):
        tier = ", all of them in the hosts' memory,"
    return (
        f"OPER has placed {plural(rows, 'row')} of {plural(len(plan.tables), 'embedding table')}"
        f"{tier} on {plural(plan.ranks, 'rank')} ({nodes}topology {topology.name}) for "
        f"{workload.mode} with batches of {plural(workload.batch_size, 'sample')} over all ranks; "
        f"{fetching(plan)}."
    )


def _times(plan: Plan, run: Comparison | None) -> list[str]:
    """Return the predicted step, and the gain over each other method once."""
    if plan.step_time is None:
        return []
    simple = simple_plans_compared(plan)
    gains = [] if simple is None else [simple]
    gains += [] if run is None else _gains(plan.step_time.seconds, run, simple or "")
    step = f"A step is predicted to take {format_duration(plan.step_time.seconds)}"
    return [f"{'; '.join([step, *gains])}."]


def _gains(seconds: float, run: Comparison, named: str) -> list[str]:
    """Return the gains of a step of `seconds` over the next best method of a comparison and over
    TorchRec's planner, if these are not `named` already."""
    gains = []
    best, compared = next_best(run), beside(run, seconds)
    if best is not None and compared is not None and best[0] not in named:
        gains.append(compared)
    name = NAMES["torchrec"]
    other = run.methods.get("torchrec")
    longer = None if other is None else other.step_seconds
    if longer and seconds and name not in " ".join(gains):
        gains.append(f"with {name} it takes {format_factor(longer / seconds)} times as long")
    return gains


def optimality(plan: Plan) -> str:
    """Return the distance of the plan from optimal, and its terms."""
    certificate = plan.certificate
    if certificate is None:
        return "Nothing was proved about how far it is from optimal: it was put together by hand."
    seconds = format_duration(plan.cost.objective_seconds)
    if certificate.certified_gap is None:
        return (
            f"The transfer time of rows is {seconds} on the slowest rank; no lower bound is known."
        )
    within = format_gap(certificate.certified_gap).removeprefix("<")
    return (
        f"The transfer time of rows, {seconds} on the slowest rank, is proved optimal to within "
        f"{within}: by the same cost model, no placement of whole rows in as much memory takes "
        f"less than {format_duration(certificate.lower_bound_seconds)}."
    )


def memory_sentences(plan: Plan, curve: Sequence[CurvePoint] | None) -> list[str]:
    """Return the effects of the memory limit, and the reason for no more copies."""
    made, fits = copies(plan), fit(plan)
    if made.limit == CopiesLimit.IN_HOSTS:
        return ["All tables are in the hosts' memory, where each row is on one rank."]
    said = (
        f"The fullest rank holds {format_bytes(fits.held_bytes)} of the "
        f"{format_bytes(fits.room_bytes)} that it may."
    )
    taken = (
        f"Copies of rows take {format_share(made.used_share)} of the tables' bytes."
        if made.used_share
        else "No row has a copy." + _why_no_copy(plan)
    )
    if made.limit in (CopiesLimit.ONE_RANK, CopiesLimit.NOT_KNOWN):
        return [f"{said} {taken}"]
    if made.limit == CopiesLimit.LEAST_MEMORY:
        assert made.saved_share is not None
        more = (
            "Twice the memory, or all that is allowed, would make no plan faster."
            if made.saved_share < _NOTICED
            else f"With all of that memory no plan would save more than "
            f"{format_share(made.saved_share)} of the transfer time."
        )
        return [f"Memory is not the limit. {said} {taken} {more}"]
    assert made.allowed_share is not None
    asked = f"{100 * made.allowed_share:.4g}% of extra memory was allowed for"
    if made.limit == CopiesLimit.NONE_PAYS:
        return [f"Memory is not the limit. {said} {taken} {asked} them."]
    allowed = f"{asked} copies, and all is used"
    if made.limit == CopiesLimit.NONE_ALLOWED:
        allowed = "no copies of rows were allowed"
    if curve is None:
        return [f"{allowed[:1].upper()}{allowed[1:]}: more memory may help. {said}"]
    seconds = next(point.step_seconds for point in curve if point.plan)
    if any(point.step_seconds < (1 - _NOTICED) * seconds for point in curve):
        return [f"Memory is a limit: {allowed}. {said}"]
    return [f"Memory is not the limit: {allowed}, but more would not help. {said}"]


def _why_no_copy(plan: Plan) -> str:
    if plan.ranks == 1:
        return " There is one rank."
    if plan.workload.training:
        return (
            " A copy spares its readers the fetch, but its gradients have to be added up over all "
            "ranks, which here takes as long or longer."
        )
    return " None would save time, or none fits."


def time_sentences(plan: Plan) -> list[str]:
    """Return the parts of a rank's time, and the traffic of links."""
    prediction = plan.cost
    total = float(prediction.rank_seconds.mean())
    if plan.ranks == 1 or not total:
        return []
    fetched = prediction.link_bytes[~np.eye(plan.ranks, dtype=bool)]
    taken = prediction.link_seconds + prediction.gradient_link_seconds
    said = [f"Bytes that can be read a second: {_link_speeds(plan)}."]
    if not fetched.any():
        return [*said, "In a step no rank fetches rows from another."]
    said.append(
        _evenness("In a step every rank fetches {} from every other", fetched, format_bytes)
    )
    nodes = np.array(plan.topology.node_of)
    outside = nodes[:, None] != nodes[None, :]
    away = ~np.eye(plan.ranks, dtype=bool)
    inside = away & ~outside
    share = float(taken[outside].sum() / plan.ranks / total)
    if outside.any() and inside.any():
        what = "Rows and gradients" if plan.workload.training else "Rows"
        said.append(
            f"{what} of a pair of ranks take {format_duration(float(taken[inside].mean()))} within "
            f"a node and {format_duration(float(taken[outside].mean()))} between nodes: "
            f"{share:.0%} of a rank's time goes over links between nodes."
        )
    return said


def _evenness(pattern: str, values: Floats, shown: Any) -> str:
    """Return `Every … 258 kB …` if all are even, and otherwise their range."""
    least, most = float(values.min()), float(values.max())
    if least >= (1 - _EVEN) * most:
        return f"{pattern.format(shown(most))}."
    said = pattern.format(f"{shown(least)} to {shown(most)}")
    return f"{said}, on average {shown(float(values.mean()))}."


def kinds_sentence(plan: Plan, kinds: RowsByKind) -> str:
    """Return the share of rows and of accesses of each kind of row."""
    every = int(plan.owner_accesses.sum()) + plan.replica_accesses
    listed = plan.counts.total_accesses - plan.replica_accesses
    rows = int(kinds.rows.sum())
    said = [
        f"{_are(int(of_kind.sum()))} {name} ({of_kind.sum() / rows:.1%}, with "
        f"{accesses / max(every, 1):.1%} of the accesses)"
        for name, of_kind, accesses in (
            ("replicated", kinds.replicated, plan.replica_accesses),
            ("listed", kinds.listed, listed),
            ("striped", kinds.striped, every - plan.replica_accesses - listed),
        )
        if of_kind.any()
    ]
    return f"Of {plural(rows, 'row')} {', '.join(said)}."


def _are(number: int) -> str:
    return "1 is" if number == 1 else f"{number:,} are"


def certificate_sentences(plan: Plan) -> list[str]:
    """Return the certificate in words."""
    certificate = plan.certificate
    said = [optimality(plan)]
    if certificate is None:
        return said
    said.append(
        "The bound follows from how often each row is read, the speeds of the links and the memory "
        "limits alone (by Lagrangian duality). It holds for every placement of whole rows, not "
        "only for those that OPER tries, but not for placements that split rows by columns. How "
        "well the cost model meets a machine is another question: see what the times leave out."
    )
    full = certificate.full_memory_bound_seconds
    if full is not None:
        said.append(
            f"The bound is for plans whose copies take as much memory as this one's. With all the "
            f"memory that the devices have for it, no plan takes less than {format_duration(full)}."
        )
    notes = (hot_row(certificate), bound_note(certificate))
    said += [_sentence(note) for note in notes if note is not None]
    if plan.host is not None and plan.memories[0].tables:
        said.append(
            "The tables on devices and in the hosts' memory are planned one after the other; the "
            "bound is for both together."
        )
    return said


def making(plan: Plan) -> list[tuple[str, str]]:
    """Return the making of the plan, as names and sentences for a reviewer."""
    record, workload = plan.record, plan.workload
    batches = plan.samples / workload.batch_size
    part = ", of a part of the log" if plan.log_part else ""
    made = [
        (
            "workload",
            f"{workload.mode}, batches of {workload.batch_size:,} samples over all ranks; "
            f"{fetching(plan)}",
        ),
        (
            "profile",
            f"{plan.samples:,} samples{part}, {format_digits(batches, 3)} batches; digest "
            f"{plan.profile[:16]}",
        ),
    ]
    if record is not None:
        made.append(("rows placed by", _PLACED_BY.get(record.step, record.step)))
    if plan.limits is not None and plan.limits.reserve is not None:
        share = format_share(plan.limits.reserve, 0)
        made.append(("left free on the devices", f"{share} of their memory, for the dense layers"))
    return made


def _link_speeds(plan: Plan) -> str:
    """Return bytes a second of a rank's own rows, and of others' in the node and outside."""
    topology = plan.topology
    speeds = 1 / topology.link_cost
    diagonal = np.eye(plan.ranks, dtype=bool)
    nodes = np.array(topology.node_of)
    other = nodes[:, None] != nodes[None, :]
    said = [
        f"{name} {_range(speeds[which])}"
        for name, which in (
            ("a rank's own rows", diagonal),
            ("other ranks of the node", ~diagonal & ~other),
            ("other nodes", other),
        )
        if which.any()
    ]
    if plan.tier and topology.host_bandwidth is not None:
        said.append(f"tables in the hosts' memory {_range(np.array(topology.host_bandwidth))}")
    return ", ".join(said)


def _range(values: Floats) -> str:
    least, most = format_bytes(float(values.min())), format_bytes(float(values.max()))
    return least if least == most else f"{least} to {most}"


def left_out(plan: Plan) -> list[str]:
    """Return the parts of a job that the predicted times leave out."""
    moved = "rows and gradients" if plan.workload.training else "rows"
    said = [
        "The predicted step includes launches of kernels, waits and exchanges, but no sorts, dense "
        "layers or reading of input.",
        f"All other times are transfer times: of moving {moved} alone, without launches, and as if "
        "no rank waited for another. Reads from several ranks are added up, as if they came one "
        "after the other.",
        "Times follow from how often rows were read in the profiled log. Where other rows become "
        "hot, they change.",
        "Each link has one speed, whatever else uses it at the time.",
    ]
    if not plan.topology.name.startswith("cpu:"):
        said.append(
            "The speeds are those of the topology: of a preset they are published figures with a "
            "margin, not measurements of this cluster."
        )
    if plan.tier:
        said.append(
            "Reads of tables in the hosts' memory are priced as if no device cached any of their "
            "rows: an upper bound."
        )
    if plan.log_part:
        said.append("Only a part of the log was profiled.")
    return said


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
