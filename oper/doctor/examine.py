"""All findings about a plan, a model and this machine, as `oper doctor` prints them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from oper.base.errors import OperError
from oper.base.free_memory import free_memory
from oper.doctor.finding import Finding
from oper.doctor.machine_findings import (
    gpu_findings,
    rank_findings,
    ranks_here,
    version_findings,
)
from oper.doctor.memory_findings import (
    dense_bytes,
    device_findings,
    host_findings,
    row_bytes,
    tier_findings,
)
from oper.doctor.model_file import make_model
from oper.doctor.table_findings import table_findings
from oper.plan.plan import Plan
from oper.topology.topology import Topology


def examine(folder: Path | str, model: str, topology: str | None = None) -> list[Finding]:
    """What fits and what does not: the plan of a folder, the model that `FILE.py:FUNCTION` makes,
    and this machine. `topology` says what devices there are, where the plan's name does not.

    Raises OperError where the plan or the model cannot be had.
    """
    plan = Plan.load(folder)
    return examine_model(plan, make_model(model, plan), topology)


def examine_model(plan: Plan, model: nn.Module, topology: str | None = None) -> list[Finding]:
    """The same of a plan and a model."""
    named = _topology(plan, topology)
    findings, matched = table_findings(plan, model)
    if any(finding.level == "problem" for finding in findings):
        text = "what the ranks need is counted when the tables fit"
        findings.append(Finding("note", "device memory", text))
    elif matched:
        rows, tier = row_bytes(plan, matched)
        dense = dense_bytes(model, matched, plan.workload.training)
        findings += device_findings(plan, rows, dense, _devices(plan, named))
        if "shared" in plan.topology.memory:
            mine = np.asarray(rows + tier)
            findings += host_findings(plan, mine, dense, ranks_here(plan), free_memory())
        else:
            findings += tier_findings(tier, _hosts(named))
    return [*findings, *rank_findings(plan), *gpu_findings(plan), *version_findings()]


def _topology(plan: Plan, given: str | None) -> Topology | None:
    """The topology that says what devices and hosts hold, which a plan does not: the given one, or
    the preset of the plan's name. None where there is none for so many ranks."""
    if given is not None:
        topology = Topology.load(given)
        if topology.ranks != plan.ranks:
            raise OperError(
                f"--topology {given}: has {topology.ranks} ranks, and the plan {plan.ranks}"
            )
        return topology
    try:
        topology = Topology.load(plan.topology.name)
    except OperError:
        return None
    return topology if topology.ranks == plan.ranks else None


def _devices(plan: Plan, named: Topology | None) -> tuple[str, Sequence[int]] | None:
    """Where the sizes of the devices' memory are from, and the bytes of each rank's, [M]."""
    if named is not None and named.memory_for_plans is not None:
        return named.name, named.memory_for_plans
    if torch.cuda.device_count() and "shared" not in plan.topology.memory:
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, found here", (properties.total_memory,) * plan.ranks
    return None


def _hosts(named: Topology | None) -> tuple[str, Sequence[int]] | None:
    """The same of each rank's share of its host's memory."""
    if named is None or named.host_memory_bytes is None:
        return None
    return named.name, named.host_memory_bytes
