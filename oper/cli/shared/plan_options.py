"""Options of all commands that plan: topology, workload, limits and objectives."""

import typer

from oper.topology.topology import Topology

TOPOLOGY = typer.Option(
    ..., "--topology", help="dgx-a100, dgx-h100, 2x4-a100 (any NxG), cpu:N, or a YAML file."
)
MODE = typer.Option(
    "training",
    "--mode",
    metavar="training|inference",
    help="Training adds gradients, AllReduce and optimizer states.",
)
FETCH = typer.Option(
    "raw",
    "--fetch",
    metavar="raw|distinct",
    help="Whether every access reads its row, or a rank reads each row once per batch.",
)
BATCH_SIZE = typer.Option(
    65_536, "--batch-size", min=1, help="Samples per iteration, over all ranks."
)
EXTRA_MEMORY = typer.Option(
    "5%", "--extra-memory", help="Bytes of copies, as a share of the tables' bytes."
)
THRESHOLD = typer.Option(
    "0.1%", "--threshold", help="Largest partition, as a share of bytes and of accesses."
)
DOB = typer.Option(
    "99.9%", "--dob", help="Degree of balance (min/max) at which partitions are fine enough."
)
BALANCE = typer.Option(
    "time",
    "--balance",
    metavar="time|link",
    help="Minimise the iteration time, or even out link costs.",
)
CAPACITY = typer.Option(
    None,
    "--capacity",
    help="Bytes per rank (64GB) or a factor of total/ranks (1.25); one value, or one a rank: "
    "64GB,32GB.",
)


def load_topology(spec: str, capacity: str | None) -> Topology:
    """The topology of that name or file, with the given capacities instead of its own."""
    topology = Topology.load(spec)
    if capacity is None:
        return topology
    return topology.with_capacity(capacity)
