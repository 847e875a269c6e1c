"""What a plan's figures say, as sentences for readers who have not seen oper before."""

from typing import Any

from oper.base.formatting import (
    at_most,
    format_bytes,
    format_duration,
    format_share,
    plural,
)
from oper.plan.plan import Plan
from oper.report.charts.comparison_bars import next_best

_NOTICED = 5e-5  # a share below it prints as 0.00%


def headline(plan: Plan, run: dict[str, Any] | None) -> list[str]:
    """Three sentences: what was placed where, what it costs beside the next best method of a
    comparison, and how far it can be from optimal."""
    return [_placed(plan), _predicted(plan, run), optimality(plan)]


def _placed(plan: Plan) -> str:
    rows, workload = int(plan.layout.rows.sum()), plan.workload
    on = plural(plan.ranks, "rank")
    per_node = ""
    if plan.topology.nodes > 1:
        per_node = f" on {plural(plan.topology.nodes, 'node')}"
    tier = f", {plural(len(plan.tier), 'table')} of them in the hosts' memory" if plan.tier else ""
    return (
        f"OPER has placed {plural(rows, 'row')} of {plural(len(plan.tables), 'embedding table')}"
        f"{tier} on {on}{per_node} ({plan.topology.name}) for {workload.mode} with batches of "
        f"{plural(workload.batch_size, 'sample')} over all ranks."
    )


def _predicted(plan: Plan, run: dict[str, Any] | None) -> str:
    seconds = plan.prediction.objective_seconds
    predicted = (
        f"Moving the rows of an iteration is predicted to take {format_duration(seconds)} on the "
        "slowest rank"
    )
    best = None if run is None else next_best(run)
    if best is None:
        return f"{predicted}."
    name, other = best
    if not seconds or other <= seconds:
        return (
            f"{predicted}; {name}, compared under the same limits, takes {format_duration(other)}."
        )
    return (
        f"{predicted}, {other / seconds:.2f} times faster than with the next best method that fits "
        f"into memory, {name} ({format_duration(other)})."
    )


def optimality(plan: Plan) -> str:
    """How far from optimal the plan can be, and relative to what."""
    certificate = plan.certificate
    if "certified_gap" not in certificate:
        return "Nothing was proved about how far it is from optimal: it was put together by hand."
    gap, bound = certificate["certified_gap"], certificate["lower_bound_seconds"]
    return (
        f"It is proved to take {at_most(gap)} longer than the best plan possible within the same "
        f"memory: no such plan takes less than {format_duration(bound)}."
    )


def memory_sentence(plan: Plan) -> str:
    """Whether memory is what limits the plan."""
    prediction = plan.prediction
    used = prediction.extra_memory_ratio
    asked = plan.settings.get("extra_memory")
    fullest = int(prediction.memory_bytes.argmax())
    held, room = float(prediction.memory_bytes[fullest]), float(prediction.capacity_bytes[fullest])
    sentence = (
        f"The fullest rank holds {format_bytes(held)} of the {format_bytes(room)} that it may "
        f"({format_share(held / room if room else 0.0, 1)}); copies of rows take "
        f"{format_share(used)} more than one copy of each row would."
    )
    full = plan.certificate.get("full_memory_bound_seconds")
    seconds = prediction.objective_seconds
    if full is not None and seconds:
        saved = max(1 - full / seconds, 0.0)
        shown = "noticeably" if saved < _NOTICED else f"more than {format_share(saved)}"
        return (
            f"Memory is not the limit. {sentence} With all the memory of the devices no plan takes "
            f"{shown} less time; this one uses the least memory that comes within 1% of the "
            "fastest."
        )
    if asked is not None and used >= asked * 0.99 and asked > 0:
        return (
            f"Memory is a limit: the plan uses all of the {100 * asked:.4g}% of extra memory that "
            f"it was given. {sentence}"
        )
    if asked == 0:
        return f"Memory is a limit: no copies were allowed. {sentence}"
    return (
        f"Memory is not the limit: further copies would cost more than they save, or none fit. "
        f"{sentence}"
    )


def certificate_sentences(plan: Plan) -> list[str]:
    """The certificate, said in words."""
    certificate = plan.certificate
    said = [optimality(plan)]
    if "certified_gap" not in certificate:
        return said
    said.append(
        "The bound is computed from the row counts, the links and the limits alone, by "
        "Lagrangian duality, and holds for every placement of whole rows, not only for those that "
        "OPER tries."
    )
    full = certificate.get("full_memory_bound_seconds")
    if full is not None:
        said.append(
            "It is for plans with the same extra memory, "
            f"{format_share(plan.settings['extra_memory'])} of the tables' bytes. With all that "
            f"the devices hold no plan takes less than {format_duration(full)}."
        )
    notes = (certificate.get(key) for key in ("hot_row", "bound_note"))
    said += [_sentence(note) for note in notes if note]
    if plan.parts is not None:
        said.append(
            "The tables on devices and in the hosts' memory are planned one after the other; the "
            "bound is for both together."
        )
    return said


def left_out(plan: Plan) -> list[str]:
    """What the predicted times do not have in them."""
    said = [
        "Times are of moving rows and gradients alone: no launches of kernels, no dense layers, no "
        "reading of input.",
        "They follow from how often rows were read in the profiled log. Where other rows become "
        "hot, `oper drift` says what the plan costs then.",
        "Links have one speed each, whatever else uses them at the time, and ranks work at once "
        "without waiting for each other.",
    ]
    if plan.topology.name in ("dgx-a100", "dgx-h100") or "x" in plan.topology.name:
        said.append(
            "The speeds of a topology preset are published figures with a margin, not measurements "
            "of this cluster."
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
