"""Latency: the fixed seconds of messages and kernels, in addition to those of their bytes.

As in LogP (Culler et al., PPoPP 1993): a rank that exchanges messages with several others at once
waits one hop for the first, and a little more for each further message.
"""

from dataclasses import dataclass, fields, replace

from oper.base.errors import OperError
from oper.topology.number_ranges import LATENCY


@dataclass(frozen=True)
class Latency:
    """Seconds of hops, messages and kernels; each may be 0.

    same_node, other_node: a hop, from rank to rank. message: each further message of an exchange,
    per rank. kernel: the start of a kernel; on CPU ranks, the call of an operator.
    """

    same_node: float
    other_node: float
    message: float = 0.0
    kernel: float = 0.0

    def __post_init__(self) -> None:
        for name in LATENCIES:
            value = getattr(self, name)
            if value != 0 and not LATENCY.holds(value):
                raise OperError(f"latency of {name}: expected 0, or {LATENCY}, got {value}")

    @staticmethod
    def of_hops(seconds: float) -> "Latency":
        """Return hops of `seconds` everywhere; messages and kernels take none."""
        return Latency(seconds, seconds)

    @property
    def content(self) -> float | dict[str, float]:
        """Latency in a topology's file: one number if hops are all."""
        one = self == Latency.of_hops(self.same_node)
        return self.same_node if one else {name: getattr(self, name) for name in LATENCIES}

    def scaled(self, factor: float) -> "Latency":
        """Return every latency times `factor`."""
        return replace(self, **{name: factor * getattr(self, name) for name in LATENCIES})

    def exchange_seconds(self, peers: int, other_node: bool = True) -> float:
        """Return the seconds of an exchange in which a rank sends a message to each of its
        `peers`."""
        hop = self.other_node if other_node else self.same_node
        return hop + (peers - 1) * self.message if peers else 0.0


LATENCIES = tuple(field.name for field in fields(Latency))

# Hops are rounded from NCCL's own tuning model (nccl/src/graph/tuning.cc, hwLat): 1.9 µs over
# NVLink (ring, LL128), 4 to 5 µs over a network (ring LL128, tree LL). A kernel of 2.9 µs takes 3.8
# if launches overlap, and 9.6 if the host waits for each (NVIDIA, "Getting Started with CUDA
# Graphs"): between these. A thread of the host posts about 1.7 million messages a second (NVIDIA,
# "Improving Network Performance of HPC Systems Using NVSHMEM and GPUDirect Async", 2022, of IBRC).
DEVICES = Latency(same_node=2e-6, other_node=5e-6, message=0.6e-6, kernel=4e-6)
# CPU ranks over shared memory and gloo: measured by `oper topology measure` on the machine of
# presets.CPU_LOCAL.
CPU_RANKS = Latency(same_node=20e-6, other_node=60e-6, message=10e-6, kernel=25e-6)
