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
from oper.doctor.memory_findings import dense_bytes, device_findings, host_findings, row_bytes
from oper.doctor.model_file import make_model
from oper.doctor.table_findings import table_findings
from oper.plan.plan import Plan, load_plan
from oper.topology.topology import Topology


def examine(folder: Path | str, model: str, topology: str | None = None) -> list[Finding]:
    """What fits and what does not: the plan of a folder, the model that `FILE.py:FUNCTION` makes,
    and this machine. `topology` says what devices there are, where the plan's name does not.

    Raises OperError where the plan or the model cannot be had.
    """
    plan = load_plan(folder)
    return examine_model(plan, make_model(model, plan), topology)


def examine_model(plan: Plan, model: nn.Module, topology: str | None = None) -> list[Finding]:
    """The same of a plan and a model."""
    devices = _devices(plan, topology)
    findings, matched = table_findings(plan, model)
    if any(finding.level == "problem" for finding in findings):
        text = "what the ranks need is counted when the tables fit"
        findings.append(Finding("note", "device memory", text))
    elif matched:
        rows, tier = row_bytes(plan, matched)
        dense = dense_bytes(model, matched, plan.workload.training)
        findings += device_findings(plan, rows, dense, devices)
        if "shared" in plan.topology.memory:
            mine = np.asarray(rows + tier)
            findings += host_findings(plan, mine, dense, ranks_here(plan), free_memory())
    return [*findings, *rank_findings(plan), *gpu_findings(plan), *version_findings()]


def _devices(plan: Plan, topology: str | None) -> tuple[str, Sequence[int]] | None:
    """Where the sizes of the devices' memory are from, and the bytes of each rank's, [M]."""
    if topology is not None:
        given = Topology.load(topology)
        if given.ranks != plan.ranks:
            raise OperError(
                f"--topology {topology}: has {given.ranks} ranks, and the plan {plan.ranks}"
            )
        if given.memory_for_plans is not None:
            return given.name, given.memory_for_plans
    try:
        named = Topology.load(plan.topology.name)  # a plan does not say what its devices hold
    except OperError:
        named = None
    if named is not None and named.ranks == plan.ranks and named.memory_for_plans is not None:
        return named.name, named.memory_for_plans
    if torch.cuda.device_count() and "shared" not in plan.topology.memory:
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, found here", (properties.total_memory,) * plan.ranks
    return None
