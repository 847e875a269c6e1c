"""Measurement of the ranks' links, as a topology and as a topology file."""

import os
import platform
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from oper.files.overwrite_rules import FILE_MARK
from oper.topology.latency import LATENCIES, Latency
from oper.topology.links import LINKED, SHARED, NodeMemory
from oper.topology.topology import Topology

REPETITIONS = 21


@dataclass(frozen=True)
class Measurement:
    """Measurement by M ranks; `bandwidth` and `spread` are [M][M], reader by source.

    Spread is (largest - smallest) / median time over the repetitions. `device` is the name of the
    ranks' devices, or cpu; CPU ranks have `threads` threads.
    """

    node_of: list[int]
    bandwidth: list[list[float]]
    spread: list[list[float]]
    allreduce_bandwidth: float
    latency: Latency
    memory_bytes: list[int]
    threads: int
    row_bytes: int
    device: str = "cpu"

    @property
    def memory(self) -> NodeMemory:
        """Memory of a node: shared by CPU ranks; on devices, rows also pass their owner's links."""
        return SHARED if self.device == "cpu" else LINKED

    def topology(self, name: str, per_pair: bool = False) -> Topology:
        """Return the topology with one bandwidth for each kind of link (the medians), or one per
        pair. On CPU ranks a rank's own rows and those of other ranks of its host are one kind,
        because one memory has them all."""
        bandwidth = np.array(self.bandwidth)
        measured = Topology(
            name,
            tuple(self.node_of),
            1 / bandwidth,
            self.allreduce_bandwidth,
            self.latency,
            device_memory_bytes=tuple(self.memory_bytes),
            memory=(self.memory,) * len(set(self.node_of)),
        )
        if per_pair:
            return measured
        masks = measured.masks()
        kinds = [masks["local"], masks["same_node"], masks["other_node"]]
        if self.memory == SHARED:
            kinds = [~masks["other_node"], masks["other_node"]]
        for mask in kinds:
            if mask.any():
                bandwidth[mask] = np.median(bandwidth[mask])
        return Topology(**{**vars(measured), "link_cost": 1 / bandwidth})

    def to_yaml(self, name: str, per_pair: bool = False) -> str:
        """Return the text of a topology file, with the conditions of the measurement in a
        comment."""
        bandwidth = 1 / self.topology(name, per_pair).link_cost
        masks = self.topology(name).masks()
        content: dict[str, Any] = {"name": name, "node_of": self.node_of}
        if per_pair:
            content["bandwidth"] = [[_rounded(value) for value in row] for row in bandwidth]
        else:
            content["bandwidth"] = {
                kind: _rounded(bandwidth[mask][0]) for kind, mask in masks.items() if mask.any()
            }
        content["memory"] = self.memory
        content["allreduce_bandwidth"] = _rounded(self.allreduce_bandwidth)
        content["latency_seconds"] = {
            name: _rounded(getattr(self.latency, name)) for name in LATENCIES
        }
        sizes = [f"{size}B" for size in self.memory_bytes]
        content["device_memory"] = sizes[0] if len(set(sizes)) == 1 else sizes
        spread = float(np.median(self.spread))
        header = (
            f"# Measured by `oper topology measure` on {time.strftime('%Y-%m-%d')}: random rows of "
            f"{self.row_bytes} bytes,\n# ranks at once: {len(self.node_of)}, {self._where()}.\n"
            f"# Median of {REPETITIONS}; (largest - smallest) / median is {spread:.0%}. "
            f"Bytes per second.\n# {FILE_MARK}\n"
        )
        return header + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)

    def _where(self) -> str:
        if self.device != "cpu":
            return f"each on a device of its own: {self.device}"
        return f"threads of each: {self.threads}, {platform.machine()}, {os.cpu_count()} cores"


def _rounded(value: float) -> float:
    """Return the value with three digits, the precision of a measurement."""
    return float(f"{value:.3g}")
