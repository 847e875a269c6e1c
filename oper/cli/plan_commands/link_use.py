"""Why the links of a plan are used unevenly where that is right, said from its figures."""

from typing import TYPE_CHECKING, Any

import numpy as np

from oper.base.arrays import Floats
from oper.base.formatting import format_bytes, format_factor, format_share

if TYPE_CHECKING:
    from oper.topology.topology import Topology

# Links whose costs differ by less are as fast, and loads that differ by less are even.
_ALIKE = 0.05


def link_use(content: dict[str, Any], topology: "Topology") -> str | None:
    """A sentence where links or their loads differ; None where there is nothing to explain, and of
    plans with a tier, whose rows come over two kinds of links."""
    if content["ranks"] == 1 or "parts" in content:
        return None
    away = ~np.eye(content["ranks"], dtype=bool)
    moved, cost = np.array(content["link_bytes"])[away], topology.link_cost[away]
    if not moved.any():
        return None
    balance = content["dob"]["link_cost"]
    fast = cost <= cost.min() * (1 + _ALIKE)
    if fast.all() and balance > 1 - _ALIKE:
        return None
    even = f"what counts is their sum for each rank, and iterations are even to {_even(content)}"
    if fast.all():
        return f"the least busy is used {format_share(balance, 1)} as long as the busiest; {even}"
    slower = format_factor(float(cost[~fast].mean() / cost[fast].mean()))
    through = {True: _mean(moved[fast]), False: _mean(moved[~fast])}
    share = format_share(float((~fast).mean()), 0)
    links = f"{share} of the links are {slower} times slower than the fastest"
    if through[False] < through[True] * (1 - _ALIKE):
        return (
            f"{links}, so ranks read less through these: {format_bytes(through[False])} a pair of "
            f"ranks, {format_bytes(through[True])} through fast ones"
        )
    if through[False] > through[True] * (1 + _ALIKE):
        return (
            f"{links}, and {format_bytes(through[False])} a pair of ranks go through these, "
            f"{format_bytes(through[True])} through fast ones; {even}"
        )
    return (
        f"{links} and carry as much as fast ones, {format_bytes(through[True])} a pair of ranks; "
        f"{even}"
    )


def _mean(values: Floats) -> float:
    return float(values.mean())


def _even(content: dict[str, Any]) -> str:
    seconds = content["rank_seconds"]
    return format_share(min(seconds) / max(seconds) if max(seconds) else 1.0)
