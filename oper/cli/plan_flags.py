"""Flags of `oper plan` that repeat the settings of an existing plan.

In: `Plan`. Out: words of a command. A plan keeps its topology without the file that it came from,
and the fetch that was chosen; all other settings are kept as they were given.
"""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from oper.base import defaults
from oper.base.units import parse_share
from oper.cli.shared.plan_options import parse_tier

if TYPE_CHECKING:
    from oper.plan.plan import Plan
    from oper.topology.capacity import Capacity
    from oper.topology.topology import Topology

_FILE = "FILE"  # the place of a topology's file in a command


class PlanFlags(NamedTuple):
    """The flags as they are typed in a shell, and the settings that no flag can give, in words."""

    typed: str
    unsaid: tuple[str, ...]


def plan_flags(plan: "Plan", copy_all: bool = False) -> PlanFlags:
    """Return the flags that plan again as `plan` was planned; with `copy_all` those for copies of
    all rows on all ranks."""
    unsaid: list[str] = []
    words = shlex.join(word for pair in _flags(plan, copy_all, unsaid) for word in pair)
    return PlanFlags(words, tuple(unsaid))


def _flags(plan: "Plan", copy_all: bool, unsaid: list[str]) -> Iterator[tuple[str, str]]:
    """Yield flags and values other than the defaults; settings without a flag go to `unsaid`."""
    workload, asked, topology = plan.workload, plan.asked, plan.topology
    if _is_preset(topology):
        yield "--topology", topology.name
    else:
        unsaid.append(f"{_FILE} is the file of the topology called {topology.name!r}")
        yield "--topology", _FILE
    if topology.capacity is not None and not (plan.limits and plan.limits.by_devices):
        yield "--capacity", _typed_capacity(topology.capacity)
    if workload.mode != "training":
        yield "--mode", workload.mode
    if workload.batch_size != defaults.BATCH_SIZE:
        yield "--batch-size", str(workload.batch_size)
    if plan.pooled_tables and workload.fetch != "pooled":
        yield "--fetch", "auto"
    elif topology.nodes > 1 or workload.fetch != "raw":
        yield "--fetch", str(workload.fetch)
    if copy_all:
        yield "--extra-memory", f"{100 * (plan.ranks - 1)}%"
    elif asked.extra_memory is not None:
        yield "--extra-memory", _typed_share(asked.extra_memory)
    if asked.reserve is not None and not copy_all:
        yield "--reserve", _typed_share(asked.reserve)
    if asked.threshold != defaults.THRESHOLD:
        yield "--threshold", _typed_share(asked.threshold)
    if asked.dob != defaults.DOB:
        yield "--dob", _typed_share(asked.dob)
    if asked.balance != "time":
        yield "--balance", asked.balance
    if asked.tier:
        typed = asked.tier if isinstance(asked.tier, str) else ",".join(asked.tier)
        if parse_tier(typed) == (asked.tier if isinstance(asked.tier, str) else [*asked.tier]):
            yield "--tier", typed
        else:
            unsaid.append("the names of the tier's tables have commas, for oper.make_plan alone")


def _is_preset(topology: "Topology") -> bool:
    """Return whether the topology's name is that of a preset with equal ranks and links."""
    from oper.base.errors import OperError
    from oper.topology.presets import preset
    from oper.topology.topology import Topology

    try:
        known = preset(topology.name)
    except OperError:  # more ranks than a topology may have
        return False
    if known is None:
        return False
    mine, its = topology.to_dict(), Topology(**known).to_dict()
    return mine | {"capacity": None} == its | {"capacity": None}


def _typed_capacity(capacity: "Capacity") -> str:
    """Return a capacity as `--capacity` reads it."""
    values = capacity if isinstance(capacity, tuple) else (capacity,)
    typed = [f"{each}B" if isinstance(each, int) else repr(each) for each in values]
    same_bytes = len(set(typed)) == 1 and isinstance(values[0], int)
    return typed[0] if same_bytes else ",".join(typed)


def _typed_share(share: float) -> str:
    """Return a share as it is typed, in per cent if this gives the same number."""
    percent = f"{100 * share:g}%"
    return percent if parse_share(percent, "share") == share else _exact(share)


def _exact(share: float) -> str:
    return repr(share) if share <= 1 else f"{100 * share!r}%"
