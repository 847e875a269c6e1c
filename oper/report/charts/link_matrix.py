"""Bytes that ranks read from each other: a matrix, reader by source, as a heat map."""

import numpy as np

from oper.base.arrays import Floats
from oper.base.formatting import format_bytes, format_digits, format_duration
from oper.plan.plan import Plan
from oper.report.charts.chart import (
    Chart,
    axis,
    bytes_unit,
    column_name,
    duration_unit,
    of_columns,
    rank_columns,
    spec,
)

_MOST_COLUMNS = 32  # so that even two such matrices are drawn at once
_MOST_LINKS = 56  # in the table: all of eight ranks, or those with the most


def link_charts(plan: Plan) -> list[Chart]:
    """Return the bytes that each rank fetches from each other rank and, if links differ, the
    seconds of these bytes and the gradients; nothing for a single rank."""
    if plan.ranks == 1:
        return []
    prediction = plan.cost
    fetched = prediction.link_bytes
    caption = "Rows alone"
    if plan.workload.training:
        caption += "; gradients of rows with one owner go the other way"
    most = format_bytes(float(fetched.max()))
    caption += f". At most {most} go from a rank to another; its own rows it need not fetch."
    if not fetched.any():
        return []
    key, title = "links", "Bytes that each rank fetches from each other"
    charts = [_heat_map(key, title, caption, fetched, seconds=False)]
    away = ~np.eye(plan.ranks, dtype=bool)
    costs = plan.topology.link_cost[away]
    slowest, fastest = (
        fetched[away][costs == extreme].mean() for extreme in (costs.max(), costs.min())
    )
    if costs.min() < costs.max():
        taken = prediction.link_seconds + prediction.gradient_link_seconds
        caption = (
            f"A byte takes {format_digits(float(costs.max() / costs.min()), 3)} times as long over "
            f"the slowest links as over the fastest. Over the slowest a rank fetches "
            f"{format_bytes(slowest)} on average, over the fastest {format_bytes(fastest)}; the "
            f"busiest takes {format_duration(taken.max())} of the transfer time."
        )
        title = "Time that each rank takes to fetch from each other"
        if plan.workload.training:
            title += ", and to send gradients"
        charts.append(_heat_map("link-times", title, caption, taken, seconds=True))
    return charts


def _heat_map(key: str, title: str, caption: str, matrix: Floats, seconds: bool) -> Chart:
    shown = format_duration if seconds else format_bytes
    columns = rank_columns(len(matrix), _MOST_COLUMNS)
    starts = [ranks[0] for ranks in columns]
    sums = np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)
    names = [column_name(ranks) for ranks in columns]
    sizes = np.array([len(ranks) for ranks in columns])
    pairs = np.outer(sizes, sizes) - np.diag(sizes)  # of different ranks
    means = sums / np.maximum(pairs, 1)
    unit = (duration_unit if seconds else bytes_unit)(float(means.max()))
    values = [
        {
            "reader": names[i],
            "source": names[j],
            "value": unit.scaled(float(means[i, j])),
            "shown": shown(float(means[i, j])),
        }
        for i in range(len(names))
        for j in range(len(names))
        if pairs[i, j]
    ]
    several = len(columns[0]) > 1
    noun = "ranks" if several else "rank"
    encoding = {
        "x": {
            "field": "source",
            "type": "ordinal",
            "sort": names,
            "axis": axis(f"from {noun}", labelAngle=0, labelOverlap=True, labelSeparation=8),
        },
        "y": {
            "field": "reader",
            "type": "ordinal",
            "sort": names,
            "axis": axis(f"to {noun}", labelOverlap=True),
        },
        "color": {
            "field": "value",
            "type": "quantitative",
            "scale": {"scheme": "blues", "domainMin": 0, "nice": True},
            "legend": {"title": unit.name, "orient": "right"},
        },
        "tooltip": [
            {"field": "reader", "title": f"to {noun}"},
            {"field": "source", "title": f"from {noun}"},
            {"field": "shown", "title": "mean of a pair" if several else "amount"},
        ],
    }
    order = np.argsort(-matrix, axis=None, kind="stable")
    most = [(int(n // len(matrix)), int(n % len(matrix))) for n in order]
    links = [(i, j) for i, j in most if i != j]
    amount = "time" if seconds else "bytes"
    if len(links) > _MOST_LINKS:
        amount += f", the {_MOST_LINKS} largest of {len(links):,}"
    of_cells = (
        of_columns(columns).replace("A column", "A cell").replace("ranks", "ranks by as many")
    )
    return Chart(
        key=key,
        title=title,
        caption=caption + of_cells,
        spec=spec(values, height=320, mark={"type": "rect"}, encoding=encoding),
        headers=("to rank", "from rank", amount),
        rows=[(str(i), str(j), shown(float(matrix[i, j]))) for i, j in links[:_MOST_LINKS]],
    )
