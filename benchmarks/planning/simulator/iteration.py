"""One iteration: the phases of a step, as the runtime has them, and their seconds.

    wanted     ranks tell the relays of their node which rows of other nodes they want
    ids        ranks ask other nodes for rows, or forward their bags; sizes first, then contents
    serve      owners put the rows in a row; proxies and TorchRec's owners add up bags; the part of
               a forwarded bag that is its own node's is added up too
    add        vectors of owners in one node are added up (TorchRec's table-row-wise)
    answers    rows and vectors
    copies     distinct rows of the node's other ranks, and those that its relays got, by pointer
    pool       bags are pooled from rows and vectors; raw rows of the node come by pointer
    vectors    gradients of forwarded bags go back
    spread     those of TorchRec's table-row-wise, inside the owners' nodes
    sum        gradients are summed by row into mailboxes
    node sums  relays add up their node's gradients of rows of other nodes
    gradients  what other nodes' owners are to get
    merge      owners read the mailboxes of their node and update every touched row
    copy sums  of rows with a copy on each node, the sums of all nodes go to one of the holders
    totals     which sends them back, and all update their copies
    sums       the replicas' AllReduce, and the update of touched replicas

Slots and gradients are sent after how many they are, as the runtime does, all widths together; rows
and vectors are not, as their number is known. Ids are translated and sorted while the batch before
is trained, which is left out; their exchange is not, neither of pooled tables, of which the runtime
and TorchRec's pipelines may do it a batch ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planning.simulator.log import Ints, Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.phases import Phase, PhaseSeconds, nothing
from benchmarks.planning.simulator.placement import Placement
from benchmarks.planning.simulator.sums import NO_SUM, SumSeconds, gather_seconds, sum_seconds
from benchmarks.planning.simulator.traffic import Replicas, Traffic, count


@dataclass(frozen=True)
class Iteration:
    """Seconds of each phase, the mean over batches."""

    phases: dict[str, PhaseSeconds]

    @property
    def seconds(self) -> float:
        """Of a step, with flows at fair rates where they were found."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def least(self) -> float:
        """Of a step whose phases each take as long as their busiest resource."""
        return sum(phase.least for phase in self.phases.values())

    @property
    def latency(self) -> float:
        """Of hops, messages and kernels."""
        return sum(phase.latency for phase in self.phases.values())


def simulate(
    placement: Placement,
    log: Log,
    machines: Sequence[Machine],
    mode: str,
    batch_size: int,
    batches: int = 1,
) -> list[Iteration]:
    """Replay global batches of `batch_size` samples, drawn from the log, on machines with the same
    ranks and nodes."""
    training = mode == "training"
    found: list[list[dict[str, PhaseSeconds]]] = [[] for _ in machines]
    for samples in batches_of(log, machines[0].ranks, batch_size, batches):
        traffic = count(placement, log, samples, machines[0], training)
        for machine, of_machine in zip(machines, found, strict=True):
            phases = phases_of(traffic, machine, placement.allreduce, training)
            of_machine.append({phase.name: phase.on(machine) for phase in phases})
    return [
        Iteration({name: _mean([each[name] for each in of_machine]) for name in of_machine[0]})
        for of_machine in found
    ]


def batches_of(log: Log, ranks: int, batch_size: int, batches: int) -> Iterator[Ints]:
    """The samples of each rank in so many global batches, [ranks, b]: the same in every call."""
    random = np.random.default_rng(0)
    for _ in range(batches):
        yield log.draw(ranks, batch_size // ranks, random)


def phases_of(traffic: Traffic, machine: Machine, allreduce: str, training: bool) -> list[Phase]:
    """The phases of a batch's traffic, in order."""
    M = machine.ranks
    none, zeros = nothing(M), np.zeros(M)

    def moving(name: str, moved: np.ndarray, rounds: int = 1) -> Phase:
        return Phase(name, _between(moved), zeros, zeros, rounds=rounds)

    t = traffic
    phases = [
        moving("wanted", t.wanted),
        moving("ids", t.ids, rounds=2),
        Phase("serve", _between(t.serve_moved), t.serve_memory, t.serve_cache, lands=False),
        moving("add", t.add_moved),
        moving("answers", t.answers),
        moving("copies", t.copies),
        Phase("pool", _between(t.pool_moved), t.pool_memory, t.pool_cache, lands=False),
    ]
    if training:
        sums, updates = sums_of(traffic.replicas, machine, allreduce)
        phases += [
            moving("vectors", t.vectors),
            moving("spread", t.spread),
            Phase("sum", none, t.sum_memory, t.sum_cache),
            Phase("node sums", _between(t.node_sums_moved), t.node_sums_memory, zeros, lands=False),
            moving("gradients", t.gradients, rounds=2),
            Phase("merge", _between(t.merge_moved), t.merge_memory, zeros, lands=False),
            Phase("copy sums", _between(t.copy_sums), t.copy_sums_memory, zeros, rounds=2),
            Phase("totals", _between(t.copy_totals), t.copy_totals_memory, zeros, rounds=2),
            # Marks, the buffer of the sums, the sums, updates.
            Phase("sums", none, np.full(M, updates), zeros, kernels=4, sums=sums),
        ]
    return phases


def sums_of(replicas: list[Replicas], machine: Machine, method: str) -> tuple[SumSeconds, float]:
    """The replicas' AllReduce, and the bytes of memory that a rank's update takes."""
    rows = sum(r.rows for r in replicas)
    if not rows:
        return NO_SUM, 0.0
    gradients = sum(r.union * r.vector_bytes for r in replicas)
    updates = sum(r.union * 2 * (r.row_bytes + r.state_bytes) for r in replicas)
    if method == "dense":
        size = sum(r.rows * r.vector_bytes for r in replicas)
        return sum_seconds(machine, size), float(size + updates)
    if method == "bitmap":
        united = sum_seconds(machine, rows / 8)
        return united.then(sum_seconds(machine, gradients)), float(gradients + updates)
    if method == "allgather":
        sizes = sum(r.touched * (r.vector_bytes + 4) for r in replicas)
        most = float(np.max(sizes))
        return gather_seconds(machine, most), float(np.sum(sizes) + updates)
    raise ValueError(f"method {method!r} of a placement with replicas")


def _between(moved: np.ndarray) -> np.ndarray:
    """Bytes between different ranks."""
    return np.where(np.eye(len(moved), dtype=bool), 0.0, moved)


def _mean(found: list[PhaseSeconds]) -> PhaseSeconds:
    fair = [each.fair for each in found if each.fair is not None]
    return PhaseSeconds(
        float(np.mean([each.latency for each in found])),
        float(np.mean(fair)) if fair else None,
        float(np.mean([each.bound for each in found])),
    )
