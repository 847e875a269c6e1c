"""Tiny machines, logs and placements for the simulator of an iteration (benchmarks/planning/)."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.placement import Fetch, Part, Placement

# Round numbers, so that times can be found by hand. Without latencies.
PLAIN = Machine(
    name="plain",
    nodes=2,
    ranks_per_node=2,
    memory_bandwidth=1000.0,
    cache_bandwidth=4000.0,
    link_bandwidth=100.0,
    adapter_bandwidth=10.0,
    adapters_per_node=2,
    near_hop=0.0,
    far_hop=0.0,
    message=0.0,
    kernel=0.0,
)
ROW_BYTES, STATE_BYTES, DIM = 8, 4, 2


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Up to three nodes of up to three ranks, with any number of adapters."""
    ranks = draw(st.integers(1, 3))
    return replace(
        PLAIN,
        nodes=draw(st.integers(1, 3)),
        ranks_per_node=ranks,
        adapters_per_node=draw(st.integers(1, ranks)),
        link_bandwidth=draw(st.sampled_from([None, 100.0])),
        near_hop=1.0,
        far_hop=3.0,
        message=0.5,
        kernel=0.25,
    )


def random_log(random: np.random.Generator, rows: list[int], samples: int) -> Log:
    """Bags of up to four ids, empty ones too."""
    lengths = [random.integers(0, 5, samples) for _ in rows]
    return Log(
        [random.integers(0, n, of.sum()) for n, of in zip(rows, lengths, strict=True)],
        [np.concatenate([[0], np.cumsum(of)]) for of in lengths],
    )


def random_placement(
    random: np.random.Generator, ranks: int, rows: list[int], fetch: Fetch, nodes: int = 1
) -> Placement:
    """Rows of each table on random ranks, and some on all, or on one of each of several `nodes`."""
    everyone, a_node = np.arange(ranks), ranks // nodes
    source = [*np.repeat(everyone[:, None], ranks, axis=1), everyone]
    holds = [*np.eye(ranks, dtype=bool), np.ones(ranks, dtype=bool)]
    for position in range(a_node if 1 < nodes < ranks else 0):
        source.append(everyone // a_node * a_node + position)
        holds.append(everyone % a_node == position)
    parts = []
    for t, n in enumerate(rows):
        holder_set = random.integers(0, len(holds), n).astype(np.int32)
        parts.append(Part(t, ROW_BYTES, STATE_BYTES, DIM, fetch, holder_set))
    return Placement(np.array(source), np.array(holds), parts, "bitmap")
