"""`oper topology`: show a topology, or measure this machine's."""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import typer

from oper.base.errors import OperError
from oper.base.formatting import format_bytes, format_digits, format_duration, plural
from oper.base.spoken import typed_path
from oper.base.units import GB
from oper.cli.shared.command import ADVANCED, Command, CommandGroup
from oper.cli.shared.console import emit, new_console, new_table, tell
from oper.cli.shared.output_options import FORCE, JSON
from oper.files.storage import atomic_file, check_output
from oper.topology.host_tier import host_to_dict
from oper.topology.links import SHARED
from oper.topology.nearly_alike import NEARLY, as_alike
from oper.topology.presets import PRESETS
from oper.topology.topology import Topology

_LINKS = {
    "local": "own rows",
    "same_node": "another rank's, same node",
    "other_node": "another node's",
}


_SHOW_EXAMPLES = """
oper topology show 4x8-h100
"""
_MEASURE_EXAMPLES = """
oper topology measure -o here.yaml --ranks 2
"""


def register(app: typer.Typer) -> None:
    """Add `oper topology show` and `oper topology measure`."""
    verbs = typer.Typer(
        cls=CommandGroup,
        help="Show or measure ranks, nodes and the links between them.",
        epilog=_SHOW_EXAMPLES + _MEASURE_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    verbs.command("show", cls=Command, epilog=_SHOW_EXAMPLES)(show)
    verbs.command("measure", cls=Command, epilog=_MEASURE_EXAMPLES)(measure)
    app.add_typer(verbs, name="topology")


def show(
    spec: str = typer.Argument(
        metavar="NAME|FILE", help=f"{', '.join(PRESETS)} (N nodes of G devices), or a file."
    ),
    as_json: bool = JSON,
) -> None:
    """Print ranks, nodes, capacity and links."""
    topology = Topology.load(spec)
    emit(as_json, _described(topology), lambda: _print(topology))


def measure(
    output: Path = typer.Option(
        ..., "-o", "--output", help="The YAML file to write.", metavar="FILE"
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Start this many ranks on this host.", metavar="N"
    ),
    device: Literal["cpu", "cuda"] = typer.Option(
        "cpu", "--device", help="Where rows are: in the host's memory or on CUDA devices."
    ),
    per_pair: bool = typer.Option(
        False,
        "--per-pair",
        help="Write a bandwidth for each pair of ranks, not one within and one between hosts.",
        rich_help_panel=ADVANCED,
    ),
    row_bytes: int = typer.Option(
        256,
        "--row-bytes",
        min=4,
        help="Bytes of a row; reads of short rows give fewer bytes/s.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Measure the links between ranks.

    Measures random row reads and the AllReduce with the kernels of the runtime, between the ranks
    that torchrun started or those that `--ranks N` starts. On CUDA devices each rank has one: that
    of its number on the host.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun == (ranks is not None):
        raise OperError(
            "topology measure: give --ranks N to measure N ranks of this host, or run it under "
            "torchrun without --ranks to measure the ranks that torchrun starts"
        )
    if row_bytes % 4:
        raise OperError(f"--row-bytes {row_bytes}: expected a multiple of 4 (float32 values)")
    if os.environ.get("RANK", "0") == "0":  # the rank that writes
        check_output(output, overwrite=force)
    from oper.measure.launch import measure_local, measure_under_torchrun

    on_devices = device == "cuda"
    measurement = (
        measure_under_torchrun(row_bytes, on_devices=on_devices)
        if ranks is None
        else measure_local(ranks, row_bytes=row_bytes, on_devices=on_devices)
    )
    if measurement is None:
        return  # rank 0 writes for all
    with atomic_file(output, force) as temporary:
        temporary.write_text(measurement.to_yaml(output.stem, per_pair), encoding="utf-8")
    topology = Topology.load(str(output))

    def text() -> None:
        _print(topology)
        tell(f"\nwritten to {output}; use it as --topology {typed_path(output)}")

    emit(as_json, {"file": str(output), **_described(topology)}, text, written=True)


def _described(topology: Topology) -> dict[str, Any]:
    memory = topology.device_memory_bytes
    return {
        **topology.to_dict(),
        **host_to_dict(topology),
        "ranks": topology.ranks,
        "nodes": topology.nodes,
        "alike": topology.homogeneous,
        "device_memory_bytes": None if memory is None else list(memory),
    }


def _likeness(topology: Topology) -> str:
    """Return whether plans treat the ranks as equal, in words."""
    if topology.homogeneous:
        return "all ranks alike"
    if as_alike(topology).homogeneous:
        return f"ranks alike within {NEARLY:.0%}: plans are sought for the means"
    return "ranks differ"


def _latency(topology: Topology) -> str:
    """Return the latencies of the kinds of messages and kernels that these ranks have."""
    found, several = topology.latency, topology.nodes > 1
    parts = [(found.same_node, "a hop in a node")] * (topology.nodes < topology.ranks)
    parts += [(found.other_node, "to another"), (found.message, "each further message")] * several
    parts.append((found.kernel, "a kernel" if topology.of_devices else "an operator"))
    return ", ".join(f"{format_duration(seconds)} {what}" for seconds, what in parts)


def _print(topology: Topology) -> None:
    ranks, nodes = topology.ranks, topology.nodes
    out = new_console()
    out.print(
        f"{topology.name}: {plural(ranks, 'rank')} on {plural(nodes, 'node')}, "
        f"{_likeness(topology)}"
    )
    made = new_table("reads of", "pairs", "GB/s: slowest", "median", "fastest")
    for kind, mask in topology.masks().items():
        costs = topology.link_cost[mask]
        if len(costs):
            rates = [1 / costs.max(), 1 / np.median(costs), 1 / costs.min()]
            cells = [format_digits(rate / GB, 4) for rate in rates]
            made.add_row(_LINKS[kind], f"{len(costs):,}", *cells)
    out.print(made)
    out.print(
        f"AllReduce: {format_digits(topology.allreduce_bandwidth / GB, 4)} GB/s (bus bandwidth)"
    )
    out.print(f"latency: {_latency(topology)}")
    out.print(f"capacity: {_capacity(topology)}")
    shared = topology.memory.count(SHARED)
    if shared:
        where = "all nodes" if shared == nodes else f"{shared} of {plural(nodes, 'node')}"
        out.print(f"shared memory: on {where} ranks read each other's rows themselves")
    if topology.device_memory_bytes is not None:
        sizes = sorted(set(topology.device_memory_bytes))
        each = " to ".join(format_bytes(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        use = "for warnings only" if topology.memory_for_plans is None else "what plans may use"
        out.print(f"device memory ({use}): {each} a rank")
    if topology.host_memory_bytes is not None:
        sizes = sorted(set(topology.host_memory_bytes))
        each = " to ".join(format_bytes(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        out.print(f"host memory (what a tier may use): {each} a rank")
    if topology.host_bandwidth is not None:
        rates = [format_digits(rate / GB, 4) for rate in sorted(set(topology.host_bandwidth))]
        each = " to ".join(dict.fromkeys((rates[0], rates[-1])))
        out.print(f"device to host memory: {each} GB/s a rank")


def _capacity(topology: Topology) -> str:
    given = topology.capacity
    if given is None:
        if topology.memory_for_plans is not None:
            return "device memory less --reserve; with --extra-memory, an even share of all bytes"
        return "an even share of the bytes of the tables and of --extra-memory"
    factor = "{}x an even share of the tables' bytes"
    if isinstance(given, tuple):
        shown = [
            f"{c}B" if isinstance(c, int) else factor.format(format_digits(c, 6)) for c in given
        ]
    else:
        shown = [factor.format(format_digits(given, 6))]
    return ", ".join(dict.fromkeys(shown)) if len(set(shown)) <= 4 else f"{len(shown)} values"
