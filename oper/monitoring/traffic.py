"""Traffic of an iteration between ranks: as the plan predicts it, and as the engines counted it.

Engines count every batch, sampled or not (access_counters.py). Their counts are divided by the
number of batches read, so they compare with a plan's figures if the batches have the plan's size.
Rows that a relay reads for others of its node pass the relay (oper/topology/relays.py), on links
and in lookups, exactly as they are priced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from oper.base.arrays import Floats, PerPair, PerRank
from oper.cost.objective import Communication, degree_of_balance
from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.topology.relays import RelayedTopology

_SCALARS = ("accesses", "replica_accesses", "distinct_rows", "allreduce_bytes")
_VECTORS = (
    "fetched_rows",
    "fetched_bytes",
    "gradient_bytes",
    "relayed_rows",
    "relayed_bytes",
    "relayed_gradient_bytes",
    "node_copy_bytes",
    "bag_sum_bytes",
    "bag_gradient_bytes",
)


@dataclass(frozen=True)
class Traffic:
    """Traffic of an iteration of M ranks: the rows that each rank serves, the bytes of rows through
    each link, [reader, source], the bytes between ranks by kind, and the share of all accesses that
    go to rows with copies."""

    DERIVED: ClassVar = ("lookups_dob",)  # in JSON in addition to the fields

    lookups: PerRank
    link_bytes: PerPair
    communication_bytes: Communication
    replica_share: float

    @property
    def lookups_dob(self) -> float:
        """min/max of the lookups over ranks."""
        return degree_of_balance(self.lookups)


def predicted_traffic(plan: Plan) -> Traffic:
    """Return the traffic that a plan predicts for an iteration of its batch."""
    accesses = int(plan.owner_accesses.sum()) + plan.replica_accesses
    return Traffic(
        plan.cost.lookups,
        plan.cost.link_bytes,
        plan.cost.communication_bytes,
        plan.replica_accesses / max(accesses, 1),
    )


class TrafficCounts:
    """Counts of one rank's engines since the last `take`."""

    def __init__(self, engines: Sequence[EmbeddingEngine]) -> None:
        self._engines = tuple(engines)
        self._before = [engine.counters.to_dict() for engine in engines]

    def take(self) -> bytes:
        """Return this rank's mean counts of a batch, of equal length on all ranks, and start
        again."""
        ranks = self._engines[0].ranks
        total = np.zeros(len(_SCALARS) + ranks * len(_VECTORS))
        for number, engine in enumerate(self._engines):
            now, before = engine.counters.to_dict(), self._before[number]
            self._before[number] = now
            if now["lookups"] < before["lookups"]:  # someone reset them
                before = dict.fromkeys(now, 0)
            batches = max(now["lookups"] - before["lookups"], 1)
            names = (*_SCALARS, *_VECTORS)
            grown = [np.subtract(now[name], before[name]).ravel() for name in names]
            total += np.concatenate(grown) / batches
        return total.tobytes()


def counted_traffic(plan: Plan, messages: Sequence[bytes]) -> Traffic:
    """Return the traffic that all ranks counted in a batch, from the messages of `take` on each
    rank."""
    ranks = len(messages)
    table = np.array([np.frombuffer(message) for message in messages])
    counts: dict[str, Any] = dict(zip(_SCALARS, table[:, : len(_SCALARS)].T, strict=True))
    vectors = table[:, len(_SCALARS) :].reshape(ranks, len(_VECTORS), ranks)
    counts |= {name: vectors[:, number] for number, name in enumerate(_VECTORS)}
    away = ~np.eye(ranks, dtype=bool)
    rows = _through_relays(plan, counts["fetched_rows"], counts["relayed_rows"])
    read = _through_relays(plan, counts["fetched_bytes"], counts["relayed_bytes"])
    gradients = _through_relays(plan, counts["gradient_bytes"], counts["relayed_gradient_bytes"])
    link_bytes = np.where(away, read + counts["bag_sum_bytes"], 0.0)
    gradients = np.where(away, gradients + counts["bag_gradient_bytes"], 0.0)
    summed = counts["allreduce_bytes"].sum() + counts["node_copy_bytes"].sum()
    accesses = counts["accesses"].sum()
    return Traffic(
        rows.sum(axis=0) + _own_copies(plan, counts),
        link_bytes,
        Communication(float(link_bytes.sum()), float(gradients.sum()), float(summed)),
        float(counts["replica_accesses"].sum() / accesses) if accesses else 0.0,
    )


def _own_copies(plan: Plan, found: Mapping[str, Any]) -> Floats:
    """Return the rows of a batch that each rank reads from its own copies, each once if fetches are
    distinct, [M]."""
    if plan.workload.fetch != "distinct":
        return np.asarray(found["replica_accesses"])
    return np.maximum(found["distinct_rows"] - found["fetched_rows"].sum(axis=1), 0.0)


def _through_relays(plan: Plan, needed: Floats, relayed: Floats) -> Floats:
    """Return the amounts that pass between ranks, [reader, source], if rank r `needed` so much of
    each rank's rows, and `relayed` so much of them for all ranks of its node."""
    topology = plan.cost_topology
    if not isinstance(topology, RelayedTopology):
        return needed
    readers = np.indices(needed.shape)[0]
    relay, other_node = topology.relay, topology.masks()["other_node"]
    passed = np.where(other_node, relayed, needed)
    asks_relay = other_node & (relay != readers)
    np.add.at(passed, (readers[asks_relay], relay[asks_relay]), needed[asks_relay])
    return passed
