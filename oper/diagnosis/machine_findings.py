"""Findings on this machine: ranks that torchrun started, devices, versions of packages, oper's
kernels."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.diagnosis.diagnosis import Finding
from oper.plan.plan import Plan
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.device_support import why_no_device
from oper.runtime.memory.runtime_plan import check_for_devices, check_nodes, nodes_of

# The release of TorchRec and FBGEMM that belongs to each release of torch that oper supports.
RELEASES = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
PACKAGES = ("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


def rank_findings(plan: Plan, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Compare the plan's ranks with those that torchrun started, if it did."""
    a_node = _most_a_node(plan)
    if "WORLD_SIZE" not in environment:
        start = f"torchrun --nproc-per-node {a_node}"
        if plan.topology.nodes > 1:
            start += f" --nnodes {plan.topology.nodes}"
        return [Finding("ok", "ranks", f"the plan is for {plan.ranks}; start them by {start}")]
    started, here = environment["WORLD_SIZE"], environment.get("LOCAL_WORLD_SIZE")
    if started != str(plan.ranks):
        text = f"the plan is for {plan.ranks} ranks, and WORLD_SIZE is {started}"
        do = f"start {plan.ranks} ranks, or plan with a topology of {started}"
        return [Finding("problem", "ranks", text, do)]
    if here is not None and here != str(a_node):
        text = (
            f"the plan has up to {a_node} ranks a node, and torchrun started {here} on this one: "
            "what is near in the plan is not near here"
        )
        return [Finding("note", "ranks", text, "plan with the topology of these hosts")]
    return [Finding("ok", "ranks", f"the plan and torchrun both have {started}")]


def ranks_here(plan: Plan, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ranks of this host: those that torchrun started here, else those of the first
    node."""
    if environment.get("WORLD_SIZE") == str(plan.ranks):
        count = int(environment.get("LOCAL_WORLD_SIZE", plan.ranks))
        first = int(environment.get("GROUP_RANK", 0)) * count
        return list(range(plan.ranks))[first : first + count]
    return [rank for rank, node in enumerate(plan.topology.node_of) if node == 0]


def usable_devices() -> tuple[list[Cuda], list[Finding]]:
    """Return the CUDA devices here that oper can use, and the reasons against the others."""
    usable, refused = [], []
    for number in range(torch.cuda.device_count()):
        try:
            usable.append(Cuda(f"cuda:{number}"))
        except OperError as error:
            refused.append(Finding.of_error("devices", error))
    return usable, list(dict.fromkeys(refused))  # a driver or a library is common to all devices


def for_devices(plan: Plan) -> bool:
    """Return whether a plan has several ranks that are devices joined by links."""
    return "linked" in plan.topology.memory and plan.ranks > 1


def gpu_findings(plan: Plan, here: int, refused: Sequence[Finding]) -> list[Finding]:
    """Compare the devices of the plan with the `here` usable ones on this host; `refused` are the
    findings on the others."""
    if not for_devices(plan):
        return []
    needed = f"the plan has {_most_a_node(plan)} a node ({plan.topology.name})"
    try:
        check_for_devices(plan, "CUDA devices")
        check_nodes(nodes_of(plan), plan, "CUDA devices")
    except OperError as error:
        text = f"{here} here, and {needed}; on CPU ranks the times that it predicts are not theirs"
        return [Finding("note", "devices", f"{text}; {error}")]
    if not here and not refused:
        text = f"none here ({why_no_device()}), and {needed}"
        return [Finding("note", "devices", text, "look on a host of the job")]
    if here >= _most_a_node(plan):
        return [*refused, Finding("ok", "devices", f"{here} here, and {needed}")]
    text = f"{here} here that can be used, and {needed}: where ranks share one, times are longer"
    return [*refused, Finding("note", "devices", text, "look on a host of the job")]


def version_findings() -> list[Finding]:
    """Compare the installed versions with the tested ones, and check that oper's kernels load."""
    findings, installed = [], {}
    for package in ("torch", *PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    torch_version = ".".join(installed.get("torch", "").split(".")[:2])
    expected = RELEASES.get(torch_version)
    if expected is None:
        text = f"expected torch {', '.join(RELEASES)}; got {installed.get('torch')}"
        findings.append(Finding("problem", "versions", text, f"install torch {max(RELEASES)}"))
    for package in PACKAGES:
        version = installed.get(package)
        if version is None or expected is None or version.startswith(f"{expected}."):
            continue
        text = f"expected {package} {expected} with torch {torch_version}; got {version}"
        do = f"install {package} {expected}"
        findings.append(Finding("problem", "versions", text, do))
    if not {"fbgemm-gpu", "fbgemm-gpu-cpu"} & set(installed):
        do = "install fbgemm-gpu-cpu, or fbgemm-gpu on a machine with devices"
        findings.append(Finding("problem", "versions", "fbgemm is not installed", do))
    if not findings:
        text = ", ".join(f"{package} {version}" for package, version in installed.items())
        findings.append(Finding("ok", "versions", text))
    try:
        native.ops()
    except OperError as error:
        return [*findings, Finding.of_error("kernels", error)]
    return [*findings, Finding("ok", "kernels", "oper's extension loads")]


def _most_a_node(plan: Plan) -> int:
    node_of = plan.topology.node_of
    return max(node_of.count(node) for node in set(node_of))
