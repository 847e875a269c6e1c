"""Bytes between ranks in a step: predicted by the plan, and counted in a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from oper.base.errors import OperError
from oper.base.formatting import format_bytes
from oper.base.spoken import option
from oper.plan.plan import Plan
from oper.report.charts.chart import ACCENT, MUTED, Chart, axis, bytes_unit, spec

_KINDS = {"fetch": "rows fetched", "gradient": "gradients", "allreduce": "AllReduce of replicas"}

# Result of `oper.counters(model)` on a rank: counters by the collection's path.
RankCounters = Mapping[str, Mapping[str, Any]]


def counted_chart(plan: Plan, counters: Sequence[RankCounters]) -> Chart:
    """Return the bytes of the mean rank, predicted and counted. Raise OperError if the counters are
    not of the plan's ranks."""
    if len(counters) != plan.ranks:
        raise OperError(
            f"{option('--counters')}: expected the counters of the plan's {plan.ranks} ranks, in "
            f"their order, got those of {len(counters)}; give the counters of a run by this plan"
        )
    counted = dict.fromkeys(_KINDS, 0.0)
    for rank, collections in enumerate(counters):
        for counts in collections.values():
            steps = max(int(counts["steps"] or counts["lookups"]), 1)
            for kind, name in (("fetch", "fetched_bytes"), ("gradient", "gradient_bytes")):
                if len(counts[name]) != plan.ranks:
                    raise OperError(
                        f"{option('--counters')}: {name} of rank {rank} is of {len(counts[name])} "
                        f"ranks, and the plan of {plan.ranks}; give the counters of a run by this "
                        "plan"
                    )
                away = sum(b for other, b in enumerate(counts[name]) if other != rank)
                counted[kind] += away / steps / plan.ranks
            counted["allreduce"] += counts["allreduce_bytes"] / steps / plan.ranks
    moved = plan.cost.communication_bytes
    predicted = {kind: getattr(moved, kind) / plan.ranks for kind in _KINDS}
    unit = bytes_unit(max([*counted.values(), *predicted.values()]))
    values = [
        {
            "kind": _KINDS[kind],
            "which": which,
            "value": unit.scaled(amounts[kind]),
            "shown": format_bytes(amounts[kind]),
        }
        for kind in _KINDS
        for which, amounts in (("predicted", predicted), ("counted", counted))
    ]
    encoding = {
        "x": {
            "field": "kind",
            "type": "nominal",
            "sort": None,
            "axis": axis(None, labelAngle=0, labelLimit=110),
        },
        "xOffset": {"field": "which", "sort": ["predicted", "counted"]},
        "y": {
            "field": "value",
            "type": "quantitative",
            "axis": axis(f"{unit.name} of a rank and step"),
        },
        "color": {
            "field": "which",
            "type": "nominal",
            "scale": {"domain": ["predicted", "counted"], "range": [MUTED, ACCENT]},
            "legend": {"title": None, "orient": "top"},
        },
        "tooltip": [
            {"field": "kind", "title": "bytes"},
            {"field": "which", "title": "which"},
            {"field": "shown", "title": "of a rank and step"},
        ],
    }
    total = sum(counted.values()), sum(predicted.values())
    return Chart(
        key="counted",
        title="Predicted and counted traffic",
        caption=f"A rank moved {format_bytes(total[0])} a step to and from others; the plan "
        f"predicts {format_bytes(total[1])}. Counters state their number of ranks, and not "
        "their plan.",
        spec=spec(values, mark={"type": "bar", "tooltip": True}, encoding=encoding),
        headers=("bytes of a rank and step", "predicted", "counted", "counted / predicted"),
        rows=[
            (
                _KINDS[kind],
                format_bytes(predicted[kind]),
                format_bytes(counted[kind]),
                f"{counted[kind] / predicted[kind]:.3f}" if predicted[kind] else "",
            )
            for kind in _KINDS
        ],
    )
