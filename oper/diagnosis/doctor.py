"""`oper.doctor`: all findings about a plan, a model and this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from oper.base.errors import OperError, check_type
from oper.base.free_memory import free_memory
from oper.base.spoken import option
from oper.diagnosis.batch_findings import batch_findings
from oper.diagnosis.diagnosis import Diagnosis, Finding
from oper.diagnosis.machine_findings import (
    for_devices,
    gpu_findings,
    rank_findings,
    ranks_here,
    usable_devices,
    version_findings,
)
from oper.diagnosis.memory_findings import (
    dense_bytes,
    device_findings,
    free_device_findings,
    host_findings,
    row_bytes,
    tier_findings,
)
from oper.diagnosis.model_file import make_model
from oper.diagnosis.table_findings import table_findings
from oper.logs import LogKeywords
from oper.plan.plan import Plan
from oper.profiling.profile import Profile, profile_given
from oper.tables.table import tables_of_collection
from oper.topology.topology import Topology


def doctor(
    plan: Plan | Path | str,
    model: nn.Module | str,
    topology: Topology | Path | str | None = None,
    *,
    batch: Any = None,
    profile: Profile | Path | str | None = None,
    **reading: Unpack[LogKeywords],
) -> Diagnosis:
    """Report before a job everything that would not fit: tables, memory of each rank, ranks,
    versions.

    Args:
        plan: a plan, or its folder.
        model: the unsharded model, or `FILE.py:FUNCTION` with a function that returns it, of no
            arguments or of the plan. Its tables may be on the meta device.
        topology: what the devices hold, as a `Topology`, the name of a preset or a file. None: the
            plan's topology, if it is a preset, or the devices of this machine.
        batch: samples with the row ids that the script gives the model, to find ids that are
            numbered unlike the profile's: a KeyedJaggedTensor, an iterable of batches that hold
            some, of which 65,536 samples are enough, or a file in any format of logs. None: the
            numbering is not looked at.
        profile: the plan's profile, or its folder, which has the counts of all rows; None: those
            that the plan has, of its listed rows.
        reading: how to read a file of samples, by the names of the commands' options: columns,
            values, lengths and others.

    Raises:
        OperError: the plan, the model, the topology, the batch or the profile cannot be had.
    """
    check_type("doctor", "plan", plan, Plan, Path, str)
    check_type("doctor", "model", model, nn.Module, str)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    model = make_model(model, plan) if isinstance(model, str) else model
    named = _topology(plan, topology)
    if batch is None and (profile is not None or reading):
        argument = "profile" if profile is not None else next(iter(reading))
        raise OperError(f"doctor: {argument} is for reading a batch; give the batch too")
    devices, refused = usable_devices() if for_devices(plan) else ([], [])
    findings, matched = table_findings(plan, model)
    if any(finding.level == "problem" for finding in findings):
        text = "what the ranks need is counted when the tables fit"
        findings.append(Finding("note", "device memory", text))
    elif matched:
        rows, tier = row_bytes(plan, matched)
        dense = dense_bytes(model, matched, plan.workload.training)
        findings += device_findings(plan, rows, dense, _devices(plan, named))
        if "shared" in plan.topology.memory:
            bytes_of_rows = np.asarray(rows + tier)
            findings += host_findings(plan, bytes_of_rows, dense, ranks_here(plan), free_memory())
        else:
            findings += tier_findings(tier, _hosts(named))
        if for_devices(plan):
            free = [left for device in devices for left in device.free_memory()]
            findings += free_device_findings(plan, rows, dense, ranks_here(plan), free)
    if batch is None:
        text = "whether the script numbers them as the profile does was not looked at"
        findings.append(
            Finding(
                "note",
                "ids",
                text,
                f"give samples of the script's ({option('--batch')})",
            )
        )
    elif matched:
        tables = [
            table for collection in matched for table in tables_of_collection(collection.collection)
        ]
        counted = None if profile is None else profile_given("doctor", profile)
        findings += batch_findings(plan, tables, batch, reading, counted)
    findings += [
        *rank_findings(plan),
        *gpu_findings(plan, len(devices), refused),
        *version_findings(),
    ]
    return Diagnosis(tuple(findings))


def _topology(plan: Plan, given: Topology | Path | str | None) -> Topology | None:
    """Return the topology with the memory of devices and hosts, which a plan lacks: the given one,
    or the preset of the plan's name. None if there is none for the plan's number of ranks."""
    if given is not None:
        topology = given if isinstance(given, Topology) else Topology.load(given)
        name = topology.name if isinstance(given, Topology) else given
        if topology.ranks != plan.ranks:
            raise OperError(
                f"{option('--topology', name)}: has {topology.ranks} ranks, and the plan "
                f"{plan.ranks}"
            )
        return topology
    try:
        topology = Topology.load(plan.topology.name)
    except OperError:
        return None
    return topology if topology.ranks == plan.ranks else None


def _devices(plan: Plan, named: Topology | None) -> tuple[str, Sequence[int]] | None:
    """Return the source of the devices' memory sizes, and the bytes of each rank's device, [M]."""
    if named is not None and named.memory_for_plans is not None:
        return named.name, named.memory_for_plans
    if torch.cuda.device_count() and "shared" not in plan.topology.memory:
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, found here", (properties.total_memory,) * plan.ranks
    return None


def _hosts(named: Topology | None) -> tuple[str, Sequence[int]] | None:
    """Return the source of the hosts' memory sizes, and the bytes of each rank's share, [M]."""
    if named is None or named.host_memory_bytes is None:
        return None
    return named.name, named.host_memory_bytes
