"""Options of all commands that plan: topology, workload, limits and objectives."""

from collections.abc import Sequence
from typing import Literal

import typer

from oper.base import defaults
from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.shared.command import ADVANCED
from oper.topology.presets import PRESETS
from oper.topology.topology import Topology

Mode = Literal["training", "inference"]
Fetch = Literal["raw", "distinct", "pooled", "auto"]
Balance = Literal["time", "link"]

TOPOLOGY = typer.Option(
    ...,
    "--topology",
    help=f"{', '.join(PRESETS)} (N nodes of G devices), or a YAML file.",
    metavar="NAME|FILE",
)
MODE = typer.Option(
    "training",
    "--mode",
    metavar="training|inference",
    help="Training adds gradients, AllReduce and optimizer state.",
)
FETCH = typer.Option(
    None,
    "--fetch",
    metavar="raw|distinct|pooled|auto",
    help="raw: each access reads its row; distinct: a rank reads each row once per batch; pooled: "
    "other nodes add up the rows of a bag and send one vector; auto: distinct, or pooled for "
    f"tables that make the step {100 * defaults.POOLED_GAIN:g}% shorter. [default: raw on one "
    "node, auto on several]",
    rich_help_panel=ADVANCED,
)
BATCH_SIZE = typer.Option(
    defaults.BATCH_SIZE,
    "--batch-size",
    min=1,
    help="Samples of a batch, over all ranks.",
    metavar="N",
)
EXTRA_MEMORY = typer.Option(
    None,
    "--extra-memory",
    help="Memory for copies, as a share of the tables' bytes. [default: the least within 1% of the "
    "best time, more in inference over links; 5% on cpu:N, without device memory, or in training "
    "with --capacity]",
    metavar="SHARE",
)
RESERVE = typer.Option(
    None,
    "--reserve",
    help="Share of device memory for the dense part of the model. [default: 20%]",
    metavar="SHARE",
    rich_help_panel=ADVANCED,
)
THRESHOLD = typer.Option(
    f"{100 * defaults.THRESHOLD:g}%",
    "--threshold",
    help="Largest partition, as a share of bytes and of accesses.",
    metavar="SHARE",
    rich_help_panel=ADVANCED,
)
DOB = typer.Option(
    f"{100 * defaults.DOB:g}%",
    "--dob",
    help="Degree of balance (min/max) at which partitions are fine enough.",
    metavar="SHARE",
    rich_help_panel=ADVANCED,
)
BALANCE = typer.Option(
    "time",
    "--balance",
    metavar="time|link",
    help="Minimise the transfer time, or even out link costs.",
    rich_help_panel=ADVANCED,
)
CAPACITY = typer.Option(
    None,
    "--capacity",
    help="Bytes per rank (64GB) or a factor of total/ranks (1.25); one value, or one a rank: "
    "64GB,32GB.",
    metavar="BYTES|FACTOR",
    rich_help_panel=ADVANCED,
)


TIER = typer.Option(
    None,
    "--tier",
    metavar="all|TABLE,…",
    help="Tables to keep in the hosts' memory, each row on one rank, for training with caches. "
    "[default: none]",
    rich_help_panel=ADVANCED,
)


def parse_tier(tier: str | None) -> Sequence[str] | Literal["all"]:
    """Return the names of the tier's tables, or "all"."""
    if tier is None:
        return ()
    names = [name.strip() for name in tier.split(",")]
    if names == ["all"]:
        return "all"
    if "" in names:
        raise OperError(f"--tier {tier!r}: expected all, or names of tables separated by commas")
    return names


def parse_reserve(
    reserve: str | None, extra_memory: str | None, topology: Topology
) -> float | None:
    """Return the share, or None; OperError if the memory of a plan does not follow from
    devices."""
    if reserve is None:
        return None
    given = (
        "--extra-memory"
        if extra_memory is not None
        else "a capacity"
        if topology.capacity is not None
        else None
    )
    if given is not None:
        raise OperError(
            f"--reserve {reserve}: is of device memory, and {given} says what a plan may use; "
            "leave one of them out"
        )
    if topology.memory_for_plans is None:
        raise OperError(
            f"--reserve {reserve}: is of device memory, and topology {topology.name} has none that "
            "plans go by; leave it out, or give the topology a device_memory"
        )
    return parse_share(reserve, "--reserve")


def load_topology(spec: str, capacity: str | None) -> Topology:
    """Return the topology of that name or file, with the given capacities instead of its own."""
    topology = Topology.load(spec)
    if capacity is None:
        return topology
    return topology.with_capacity(capacity)
