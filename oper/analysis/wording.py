"""Sentences about facts of a plan that several places show, such as the terminal and the report."""

from collections.abc import Sequence

from oper.analysis.plan_facts import Threshold
from oper.base.formatting import (
    at_most,
    format_bytes,
    format_duration,
    format_factor,
    format_percent,
    plural,
)
from oper.cost.workload import Workload
from oper.plan.certificate import BoundNote, Certificate
from oper.plan.memories import ThresholdReason
from oper.plan.plan import Plan
from oper.plan.reference_figures import HeldOut, HeldOutSource, SimplePlan

_NOTES = {
    BoundNote.HOT_ROWS_ALONE: (
        "the programme with whole hot rows was not solved, as it is too large for so many ranks: "
        "hot rows count as whole only in what each of them alone makes a rank take"
    ),
    BoundNote.HOT_ROWS_BY_NODES: (
        "the programme with whole hot rows was not solved, as it is too large for so many ranks: "
        "hot rows count as whole only in what they make their ranks and nodes take"
    ),
    BoundNote.SEARCH_CUT: (
        "the programme with whole hot rows was stopped before branch and bound was done"
    ),
}


METHOD_NAMES = {"table_wise": "table-wise", "row_wise": "row-wise"}
# Names of data that plans were not made from.
HELD_OUT_DATA = {
    HeldOutSource.LAST_PART: "the held-out last part of the log",
    HeldOutSource.NEXT_WINDOW: "the next window",
    HeldOutSource.LATER_PART: "the later part of the newest data",
    HeldOutSource.THIS_WINDOW: "this window",
}
# Names of the candidates of a judgement, by `Choice`.
CHOICES = {
    "keep": "as it was",
    "replan": "replanned",
    "from_scratch": "from scratch",
    "full_copies": "copies of all rows",
}
_STEP_COLUMNS = ("replanned", "from scratch", "full copies")  # of the candidates after the first
OUTDATED_VOCABULARIES = (
    "The plan's vocabularies are out of date: count the log without them, and plan from scratch"
)


def judging_data(source: HeldOutSource | None, newer: str) -> str:
    """Return the name of the data that judge plans: `newer`, its later part, or held-out data of
    the profile."""
    if source is None or source == HeldOutSource.THIS_WINDOW:
        return newer
    if source == HeldOutSource.LATER_PART:
        return f"the later part of {newer}"
    return HELD_OUT_DATA[source]


def step_columns(steps: Sequence[Sequence[float]]) -> Sequence[str]:
    """Return the headings of a table's columns of other plans' steps: in each line steps of the
    plan and of the others, in seconds, or none."""
    return _STEP_COLUMNS[: max(2, *(len(each) - 1 for each in steps))]


def steps_of(steps: Sequence[float], columns: Sequence[str]) -> list[str]:
    """Return the cells of a line of such a table; - for a step that was not judged."""
    cells = list(map(format_duration, steps))
    return cells + ["-"] * (1 + len(columns) - len(cells))


def advice_words(advice: str, too_small: bool = False) -> str:
    """Return an advice, by `Choice`, for a title or a table, or that a window is too small for
    one."""
    return "too small" if too_small else advice.replace("_", " ")


NOT_MEASURED = "Not measured on data the plan has not seen"
WITHOUT_HELD_OUT = f"{NOT_MEASURED}: `oper profile --hold-out 20%` would"
# Data of a plan, by its mode: plans for inference expect unread rows to be read.
MADE_FOR = {"training": "its data", "inference": "the reads expected from its data"}
FETCHES = {
    "raw": "every access reads its row (raw fetches)",
    "distinct": "each rank reads a row once a batch (distinct fetches)",
    "pooled": "other nodes add up the rows of each bag (pooled fetches)",
    "auto": "each method's tables pooled or not, as is shortest (fetch auto)",
}


def fetching(plan: Plan) -> str:
    """Return the way in which a plan fetches rows, as a part of a sentence."""
    text, pooled = FETCHES[plan.workload.known_fetch], len(plan.pooled_tables)
    if pooled and plan.workload.fetch != "pooled":
        text += f", but of {pooled} of the tables other nodes add up the rows of each bag"
    return text


def use(plan: Plan) -> str:
    """Return the verb for a plan's mode."""
    return "train" if plan.workload.training else "serve"


def shard_line(plan: Plan, loaded: str) -> str:
    """Return the line of a script that shards a model by the plan that the expression `loaded` is;
    the tables of a tier get caches in training."""
    cache = ', cache=oper.CacheSettings("10%")' if plan.tier and plan.workload.training else ""
    return f"model = oper.shard(model, {loaded}{cache})"


def work(workload: Workload) -> str:
    """Return the work of a step, in words; times of plans compare only if it is equal."""
    return f"{workload.mode}, {workload.fetch} fetches, batch {workload.batch_size:,}"


AS_LONG = 5e-3  # a relative difference of times below which they are called equal


def held_out_sentence(found: HeldOut | None) -> str:
    """Return the step on data that the plan was not made from, without a full stop."""
    if found is None:
        return WITHOUT_HELD_OUT
    gap = found.certified_gap
    said = (
        f"On {HELD_OUT_DATA[found.source]} ({plural(found.samples, 'sample')}) a step takes "
        f"{format_duration(found.step_seconds)}; "
    )
    if gap is None:
        return f"{said}no lower bound is known for those data"
    longer = f"{at_most(gap)} longer than"
    if gap > 1:
        longer = f"at most {format_factor(1 + gap)} times as long as"
    return f"{said}its transfers take {longer} with the best plan for those data"


def unread_sentence(plan: Plan) -> str | None:
    """Return the step with reads of rows that the log never read, without a full stop; None if the
    plan does not say."""
    if plan.unread_step_seconds is None or plan.step_time is None:
        return None
    if_unread = "If 10% of the reads go to rows that this sample never read, the step takes"
    taken, predicted = map(format_duration, (plan.unread_step_seconds, plan.step_time.seconds))
    if plan.unread_step_seconds <= plan.step_time.seconds or taken == predicted:
        return f"{if_unread} no longer"
    return f"{if_unread} {taken} (predicted: {predicted})"


def memory_limit(plan: Plan) -> str:
    """Return the limit on a rank's memory that a plan keeps, and its source."""
    if plan.limits is None or plan.host is not None:
        return "what a rank may hold"
    capacity = sorted(plan.cost.capacity_bytes.tolist())
    held = " to ".join(dict.fromkeys(format_bytes(each) for each in (capacity[0], capacity[-1])))
    if plan.limits.by_devices:
        return f"the memory that devices leave for rows, {held} a rank"
    if plan.topology.capacity is not None:
        return f"the capacity of {held} a rank"
    return f"the limit of {format_percent(plan.limits.extra_memory)} extra memory, {held} a rank"


def simple_plans_compared(plan: Plan) -> str | None:
    """Return `simple_plans_sentence` of a plan; None of a plan without a predicted step."""
    if plan.step_time is None:
        return None
    return simple_plans_sentence(plan.step_time.seconds, plan.simple_plans, memory_limit(plan))


def simple_plans_sentence(seconds: float, simple: Sequence[SimplePlan], limit: str) -> str | None:
    """Return the steps with placements of tables without counts, relative to a step of `seconds`,
    or the `limit` that these exceed; None if they were not priced."""
    fitting = [(each.method, each.step_seconds) for each in simple if each.fits]
    parts = [_relative(fitting, seconds)] if fitting else []
    parts += [
        f"{METHOD_NAMES[each.method]} does not fit: it takes {format_factor(each.memory_factor)} "
        f"times {limit}"
        for each in simple
        if not each.fits
    ]
    return "; ".join(parts) or None


def _relative(others: Sequence[tuple[str, float]], seconds: float) -> str:
    """Return `table-wise takes 1.49 times as long, row-wise 1.46 times`, or `row-wise takes as
    long`."""
    said: list[str] = []
    before = False
    for method, taken in others:
        times = times_as_long(taken, seconds)
        if times is None:
            said.append(f"{METHOD_NAMES[method]} takes as long")
        else:
            verb, end = ("", "") if before else ("takes ", " as long")
            said.append(f"{METHOD_NAMES[method]} {verb}{times}{end}")
        before = times is not None
    return ", ".join(said)


def times_as_long(taken: float, seconds: float) -> str | None:
    """Return the ratio of a time to `seconds`, as `1.49 times`; None if they are equal."""
    if abs(taken - seconds) <= AS_LONG * max(taken, seconds):
        return None
    return f"{format_factor(taken / seconds)} times" if seconds else "many times"


def hot_row(certificate: Certificate) -> str | None:
    """Return the effect of a single row on the bound, if the row decides the bound."""
    if certificate.hot_row_share is None:
        return None
    return (
        f"a single row with {certificate.hot_row_share:.2%} of all accesses cannot be split: some "
        "rank takes this long for it whatever the plan"
    )


def bound_note(certificate: Certificate) -> str | None:
    """Return the reason for a bound that may be too low."""
    return None if certificate.bound_note is None else _NOTES[certificate.bound_note]


def threshold_sentence(found: Threshold) -> str:
    """Return the threshold, halved or not, with the reason."""
    said = format_percent(found.asked)
    if found.halved:
        said = f"halved from {said} to {format_percent(found.used)}"
    if found.reason == ThresholdReason.NOT_PLACED_BY_PARTITIONS:
        return f"{said}, but this plan's rows were not placed in partitions"
    why = {
        ThresholdReason.BALANCED: f"where the ranks were even to {format_percent(found.balance)}",
        ThresholdReason.NO_GAIN: (
            "where halving again no longer helped" if found.halved else "as halving it did not help"
        ),
        ThresholdReason.MOST_HALVINGS: "the least that is tried",
    }[found.reason]
    return (
        f"{said}, {why}. Rows are placed in partitions of at most this share of all bytes and of "
        "all accesses"
    )
