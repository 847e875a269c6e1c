"""Memory of each rank: needs of the plan's rows, a step's buffers and the dense part, against its
capacity.

In: `Plan`, the model, its matched collections, and the bytes that each rank's device has. Rows are
counted as the heap allocates them, with the state of the optimizers that the model has.
"""

from collections.abc import Sequence

import numpy as np
from torch import nn
from torch.nn.parameter import UninitializedParameter

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.formatting import plural
from oper.base.free_memory import FreeMemory
from oper.base.spoken import option
from oper.base.units import GB
from oper.diagnosis.diagnosis import Finding
from oper.diagnosis.table_findings import Matched
from oper.plan.plan import Plan
from oper.runtime.memory.heap import slot_bytes
from oper.runtime.tables.optimizer_buckets import make_buckets
from oper.topology.transports import NVSHMEM, STAGE_BYTES
from oper.torchrec import module_tables

# A dense parameter is taken to have Adam's two states, because its optimizer is unknown here.
_STATES = 2


def row_bytes(plan: Plan, matched: Sequence[Matched]) -> tuple[Ints, Ints]:
    """Return the bytes of rows and their state on each rank's device and in its tier, int64 [M]
    each."""
    device, tier = np.zeros((2, plan.ranks), dtype=np.int64)
    for match in matched:
        part = match.plan
        in_row, in_state = slot_bytes(part, make_buckets(part, match.tables))
        of_part = np.zeros(plan.ranks, dtype=np.int64)
        in_tier = {int(part.layout.width_of_table[table]) for table in part.tier}
        for width, slots in enumerate(np.asarray(part.layout.slots, dtype=np.int64)):
            bytes = slots * (in_row[width] + in_state[width])
            (tier if width in in_tier else of_part)[:] += bytes
        if part.topology.transport == NVSHMEM:
            of_part[:] = of_part.max() + STAGE_BYTES
        device += of_part
    return device, tier


def dense_bytes(model: nn.Module, matched: Sequence[Matched], training: bool) -> int:
    """Return the bytes of the parameters that every rank has whole: values, and in training
    gradients and states."""
    sharded = {
        id(weight)
        for match in matched
        for weight in module_tables.parameters(match.collection).values()
    }
    total = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise OperError(
                f"model: parameter {name!r} has no shape yet, as its layer is lazy; run the model "
                "on a batch in the function that makes it"
            )
        if id(parameter) not in sharded:
            copies = 2 + _STATES if training and parameter.requires_grad else 1
            total += parameter.numel() * parameter.element_size() * copies
    return total


def device_findings(
    plan: Plan,
    rows: Ints,
    dense: int,
    devices: tuple[str, Sequence[int]] | None,
) -> list[Finding]:
    """Check that each rank's part fits its device; `devices`: the source of the sizes, and the
    sizes [M]."""
    step = plan.cost.step_bytes
    needed = rows + step + dense
    fullest = int(needed.argmax())
    parts = (
        f"{_size(rows[fullest])} of rows and their state, {_size(step)} of a step's buffers, "
        f"{_size(dense)} of the dense part"
    )
    if plan.workload.training:
        parts += " with gradients and two states a value"
    if devices is None:
        if "shared" in plan.topology.memory:  # The host memory of CPU ranks is checked separately.
            return []
        text = f"rank {fullest} needs {_size(needed[fullest])}: {parts}; its device is not known"
        return [
            Finding(
                "note",
                "device memory",
                text,
                f"say what it is: give {option('--topology')}, a name or a file",
            )
        ]
    source, have = devices
    over = needed - np.asarray(have, dtype=np.int64)
    worst = int(over.argmax())
    if over[worst] > 0:
        text = (
            f"{int((over > 0).sum())} of {plan.ranks} ranks do not fit; rank {worst} needs "
            f"{_size(needed[worst])} and has {_size(have[worst])} ({source}): {parts}"
        )
        do = (
            f"plan with a larger {option('--reserve')}, less {option('--extra-memory')}, "
            f"{option('--tier')}, or for more ranks"
        )
        return [Finding("problem", "device memory", text, do)]
    findings = [
        Finding(
            "ok",
            "device memory",
            f"the fullest rank, {fullest}, needs {_size(needed[fullest])} of "
            f"{_size(have[fullest])} ({source}), without activations: {parts}",
        )
    ]
    reserve = None if plan.limits is None else plan.limits.reserve
    if reserve is not None and dense > reserve * min(have):
        text = (
            f"the dense part takes {_size(dense)}, and the plan left {reserve:.0%} of "
            f"{_size(min(have))} for it and its activations ({option('--reserve')})"
        )
        findings.append(
            Finding("note", "device memory", text, f"plan with a larger {option('--reserve')}")
        )
    return findings


def tier_findings(tier: Ints, hosts: tuple[str, Sequence[int]] | None) -> list[Finding]:
    """Check that each rank's part of the tier fits its share of its host's memory; `hosts`: the
    source of the sizes, and the sizes [M]."""
    fullest = int(tier.argmax())
    if tier[fullest] == 0:
        return []
    text = f"rank {fullest}'s part of the tier needs {_size(tier[fullest])}"
    if hosts is None:
        do = f"say what hosts have: give {option('--topology')}, a name or a file with host_memory"
        return [Finding("note", "tier", f"{text}; its host is not known", do)]
    source, have = hosts
    over = tier - np.asarray(have, dtype=np.int64)
    worst = int(over.argmax())
    if over[worst] > 0:
        text = (
            f"{int((over > 0).sum())} of {len(tier)} ranks do not fit; rank {worst}'s part needs "
            f"{_size(tier[worst])}, and its share of its host is {_size(have[worst])} ({source})"
        )
        return [Finding("problem", "tier", text, "plan for more hosts, or with fewer tables in it")]
    caches = "the caches of it on the devices come on top of what is counted there"
    return [Finding("ok", "tier", f"{text} of {_size(have[fullest])} ({source}); {caches}")]


def host_findings(
    plan: Plan, bytes: Ints, dense: int, ranks_here: Sequence[int], limits: Sequence[FreeMemory]
) -> list[Finding]:
    """Check that the ranks of this host fit its memory: CPU ranks' rows lie in anonymous shared
    memory, which /dev/shm does not limit."""
    needs = [int(bytes[rank]) + plan.cost.mailbox_bytes + dense for rank in ranks_here]
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    text = (
        f"{len(needs)} CPU ranks on this host need {_size(sum(needs))} for rows, gradients and the "
        f"dense part, and {tightest.limited_by} has {_size(tightest.free_bytes)} free; /dev/shm "
        "and its size do not matter, as rows lie in anonymous shared memory"
    )
    if sum(needs) > tightest.free_bytes:
        do = f"use fewer ranks a host, {option('--extra-memory', '0')}, or more hosts"
        return [Finding("problem", "host memory", text, do)]
    return [Finding("ok", "host memory", text)]


def free_device_findings(
    plan: Plan, rows: Ints, dense: int, ranks_here: Sequence[int], free: Sequence[FreeMemory]
) -> list[Finding]:
    """Check that the ranks of this host, which use its devices in turn, fit their free memory."""
    step = plan.cost.step_bytes
    findings = []
    for number, left in enumerate(free):
        ranks = ranks_here[number :: len(free)]
        needed = sum(int(rows[rank]) + step + dense for rank in ranks)
        text = (
            f"{left.limited_by} has {_size(left.free_bytes)} free, and {plural(len(ranks), 'rank')}"
            f" there would take {_size(needed)} without activations: each its rows and the dense "
            f"part, and {_size(step)} for a step of the plan's batch"
        )
        if needed > left.free_bytes:
            do = (
                f"free it, use more devices, or plan with a larger {option('--reserve')}, less "
                f"{option('--extra-memory')} or a smaller batch"
            )
            findings.append(Finding("problem", "device memory here", text, do))
    if free and not findings:
        return [Finding("ok", "device memory here", text)]
    return findings


def _size(bytes: float) -> str:
    return f"{bytes / GB:,.3g} GB" if bytes >= 0.1 * GB else f"{1e3 * bytes / GB:,.3g} MB"
