"""`oper topology`: show what a topology says, or measure the one at hand."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import typer

from oper.base.errors import OperError
from oper.cli.shared import common
from oper.files.storage import atomic_file, check_place
from oper.topology.links import GB
from oper.topology.topology import Topology

_LINKS = {
    "local": "own rows",
    "same_node": "rows of a rank in the node",
    "other_node": "rows of another node",
}


def register(app: typer.Typer) -> None:
    """Add `oper topology show` and `oper topology measure`."""
    verbs = typer.Typer(
        help="Ranks, nodes, capacities and link costs.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    verbs.command("show")(show)
    verbs.command("measure")(measure)
    app.add_typer(verbs, name="topology")


def show(
    spec: str = typer.Argument(help="dgx-a100, dgx-h100, 2x4-a100 (any NxG), cpu:N or a file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print ranks, nodes, capacity and links."""
    topology = Topology.load(spec)
    common.emit(as_json, _described(topology), lambda: _print(topology))


def measure(
    output: Path = typer.Option(..., "-o", "--output", help="The YAML file to write."),
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Start this many ranks on this host."
    ),
    per_pair: bool = typer.Option(
        False, "--per-pair", help="Write each pair's own bandwidth, not one for each kind of link."
    ),
    row_bytes: int = typer.Option(
        256, "--row-bytes", min=4, help="The rows that are read: short ones give fewer bytes/s."
    ),
    force: bool = common.FORCE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure the links between CPU ranks.

    Random row reads and AllReduce, as the runtime makes them. Under torchrun it measures torchrun's
    ranks; elsewhere `--ranks N` starts them.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun == (ranks is not None):
        raise OperError(
            "topology measure: give --ranks N to measure N ranks of this host, or run it under "
            "torchrun without --ranks to measure those that torchrun starts"
        )
    if row_bytes % 4:
        raise OperError(f"--row-bytes {row_bytes}: whole float32 values were needed, of 4 bytes")
    if os.environ.get("RANK", "0") == "0":  # the rank that writes
        check_place(output, overwrite=force)
    from oper.measure.launch import measure_local, measure_under_torchrun

    measurement = (
        measure_under_torchrun(row_bytes)
        if ranks is None
        else measure_local(ranks, row_bytes=row_bytes)
    )
    if measurement is None:
        return  # rank 0 writes for all
    with atomic_file(output, force) as temporary:
        temporary.write_text(measurement.to_yaml(output.stem, per_pair), encoding="utf-8")
    topology = Topology.load(str(output))

    def text() -> None:
        _print(topology)
        print(f"\nwritten to {output}; use it as --topology {output}")

    common.emit(as_json, {"file": str(output), **_described(topology)}, text)


def _described(topology: Topology) -> dict[str, Any]:
    memory = topology.device_memory_bytes
    return {
        **topology.to_dict(),
        "ranks": topology.ranks,
        "nodes": topology.nodes,
        "alike": topology.alike,
        "device_memory_bytes": None if memory is None else list(memory),
    }


def _print(topology: Topology) -> None:
    ranks, nodes = topology.ranks, topology.nodes
    out = common.console()
    out.print(
        f"{topology.name}: {common.counted(ranks, 'rank')} on {common.counted(nodes, 'node')}, "
        f"{'all alike' if topology.alike else 'not all alike'}"
    )
    made = common.table("link", "pairs", "GB/s: min", "median", "max", "median s/byte")
    for kind, mask in topology.masks().items():
        costs = topology.link_cost[mask]
        if len(costs):
            rates = [1 / costs.max(), 1 / np.median(costs), 1 / costs.min()]
            cells = [f"{rate / GB:,.4g}" for rate in rates]
            made.add_row(_LINKS[kind], f"{len(costs):,}", *cells, f"{np.median(costs):.4g}")
    rate = topology.allreduce_bandwidth
    made.add_row("AllReduce (bus)", "", "", f"{rate / GB:,.4g}", "", f"{1 / rate:.4g}")
    out.print(made)
    out.print(f"latency of a hop: {common.duration(topology.latency_seconds)}")
    out.print(f"capacity: {_capacity(topology)}")
    if topology.device_memory_bytes is not None:
        sizes = sorted(set(topology.device_memory_bytes))
        each = " to ".join(common.size(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        out.print(f"device memory (warns only): {each} a rank")


def _capacity(topology: Topology) -> str:
    given = topology.to_dict().get("capacity")
    if given is None:
        return "the tables' bytes over the ranks, times (1 + extra memory)"
    values = given if isinstance(given, list) else [given]
    shown = [
        v if isinstance(v, str) else f"{v:g} × the tables' bytes over the ranks" for v in values
    ]
    return ", ".join(dict.fromkeys(shown)) if len(set(shown)) <= 4 else f"{len(shown)} values"
