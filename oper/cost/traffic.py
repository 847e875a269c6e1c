"""Traffic of rows with one owner, and in inference of rows with any holders, with its prices.

In: the bytes that one rank moves for a row of each class, S·R for its reads and in training S·D
more for its gradient. Out: seconds of ranks. Reads and gradients have separate charges
(read_charges.py). If no ranks share memory the charges are equal, and a row has one weight, S·(R +
D), to which all its terms in T are proportional; otherwise it has two parts. With relays there is
another part for each size of node, the bytes that a relay moves for its node: S·D of the node, and
in training as much for the gradient. Rows of pooled tables have separate parts: links by reads,
memories and gradients by the rows touched.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.topology import Topology


class Part(NamedTuple):
    """Bytes of one row of each class, [C], that every rank moves, or a relay for its node, and
    their charges."""

    bytes: Floats
    charges: Charges


class Direction(NamedTuple):
    """Bytes of each class, [C]; each byte moves T by the differences of `columns` [G, M]."""

    bytes: Floats
    columns: Floats


@dataclass(frozen=True, eq=False)
class Traffic:
    """All `bytes` [C] that a rank moves for a row of each class, and their `parts` by charges."""

    bytes: Floats
    parts: tuple[Part, ...]

    @staticmethod
    def of(
        topology: Topology,
        training: bool,
        all_bytes: Floats,
        read_bytes: Floats,
        gradient_bytes: Floats,
        node_bytes: Floats,
        pooled_read_bytes: Floats,
        pooled_gradient_bytes: Floats,
    ) -> "Traffic":
        """Return the traffic of rows with `all_bytes` [C]: `read_bytes` and, in training,
        `gradient_bytes` of the rows that a rank touches. `node_bytes` [C, K] are those of each size
        of node whose ranks have relays. The two pooled arguments are the parts of pooled tables,
        which have no `node_bytes`."""
        if isinstance(topology, PooledTopology):
            pooled: tuple[Part, ...] = (
                Part(pooled_read_bytes, Charges.of(topology)),
                Part(pooled_gradient_bytes, Charges.of_memory(topology)),
            )
            if training:
                pooled += (Part(pooled_gradient_bytes, Charges.of_gradients(topology)),)
            own_reads = read_bytes - pooled_read_bytes
            own_gradients = gradient_bytes - pooled_gradient_bytes
            if not own_reads.any():
                return Traffic(all_bytes, pooled)
            own = own_reads + own_gradients if training else own_reads
            none = np.zeros_like(own)
            others = Traffic.of(
                topology.unpooled, training, own, own_reads, own_gradients, node_bytes, none, none
            )
            return Traffic(all_bytes, others.parts + pooled)
        reads, gradients = Charges.of(topology), Charges.of_gradients(topology)
        # Relays of other nodes are charged for gradients as for reads.
        times = 2 if training else 1
        of_nodes = tuple(
            Part(times * bytes, charges)
            for bytes, charges in zip(node_bytes.T, reads.of_nodes, strict=True)
        )
        if not training or gradients is reads:
            return Traffic(all_bytes, (Part(all_bytes, reads), *of_nodes))
        parts = Part(read_bytes, reads), Part(gradient_bytes, gradients), *of_nodes
        return Traffic(all_bytes, parts)

    def set_seconds(self, c: Any, sets: HolderSets, g: Any, read_by_read: bool = False) -> Floats:
        """Return the seconds that each rank, in the last axis, pays for one row of class `c` in
        holder set `g`; `c` and `g` are indices of one shape. `read_by_read` as in
        `Charges.set_seconds`."""
        return _sum(
            part.bytes[c][..., None] * part.charges.set_seconds(sets, read_by_read)[g]
            for part in self.parts
        )

    def mean_set_seconds(self, sets: HolderSets) -> Floats:
        """Return the mean over ranks of the seconds per row, [C, G]."""
        return _sum(
            np.outer(part.bytes, part.charges.set_seconds(sets).sum(axis=1) / part.charges.ranks)
            for part in self.parts
        )

    def owner_seconds(self, c: int) -> Floats:
        """Return the seconds that each rank pays for one row of class `c` with one owner, [owner,
        payer]."""
        return _sum(part.bytes[c] * part.charges.owner_seconds for part in self.parts)

    @property
    def own_seconds(self) -> Floats:
        """Lower bound on the seconds that a row with one owner takes its owner, [C]."""
        return _sum(
            part.bytes * float(part.charges.owner_seconds.diagonal().min()) for part in self.parts
        )

    @property
    def mean_owner_seconds(self) -> Floats:
        """Seconds of a rank per row with one owner, the mean over owners and ranks, [C]."""
        return _sum(part.bytes * part.charges.mean_owner_seconds for part in self.parts)

    def least_largest_seconds(self) -> Floats:
        """Return a lower bound on the largest seconds of a rank for a row with one owner, over all
        owners, [C]."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return float(part.charges.owner_seconds.max(axis=1).min()) * part.bytes
        least = np.full(len(self.bytes), np.inf)
        part_bytes = np.stack([part.bytes for part in self.parts], axis=1)
        for payers in _different_payers(tuple(part.charges for part in self.parts)):
            least = np.minimum(least, dot(part_bytes, payers.T).max(axis=1))
        return least

    def directions(self, sets: HolderSets) -> tuple[Direction, ...]:
        """Return the directions in which rows of holder sets move T, one for each part."""
        return tuple(Direction(p.bytes, p.charges.set_seconds(sets)) for p in self.parts)


@lru_cache(maxsize=4)
def _different_payers(charges: tuple[Charges, ...]) -> tuple[Floats, ...]:
    """Return the seconds that ranks pay for a byte of each part of a row with one owner, [payers,
    parts] per owner. Ranks that pay the same appear once, as do owners with the same payers."""
    by_owner = np.stack([of_part.owner_seconds for of_part in charges], axis=2)
    codes = np.zeros(by_owner.shape[:2], dtype=np.int64)  # of distinct payments
    for seconds in np.moveaxis(by_owner, 2, 0):
        different = np.unique(seconds)
        codes = codes * len(different) + np.searchsorted(different, seconds)
        codes = np.searchsorted(np.unique(codes), codes)
    paid_by_kinds: dict[bytes, Floats] = {}
    for paid, code in zip(by_owner, codes, strict=True):
        kinds, first = np.unique(code, return_index=True)
        paid_by_kinds.setdefault(kinds.tobytes(), paid[first])
    return tuple(paid_by_kinds.values())


def link_parts(
    topology: Topology, read_bytes: Floats, node_bytes: Floats, pooled_read_bytes: Floats
) -> tuple[Part, ...]:
    """Return the parts of reads alone that links carry, to be priced by `Charges.set_link_seconds`.
    The arguments are as in `Traffic.of`."""
    charges = Charges.of(without_pooling(topology))
    of_nodes = zip(node_bytes.T, charges.of_nodes, strict=True)
    parts = ((read_bytes - pooled_read_bytes, charges), *of_nodes)
    if isinstance(topology, PooledTopology):
        parts += ((pooled_read_bytes, Charges.of(topology)),)
    return tuple(Part(*part) for part in parts)


def main_direction(directions: tuple[Direction, ...]) -> Direction:
    """Return one direction that approximates several: along the last of them that moves T, with the
    bytes of the others in proportion to how far they move T that way. The result is exact if all
    move T that way."""
    away = [columns - columns.mean(axis=0) for _, columns in directions]
    least = 1e-12 * max(float(np.abs(columns).max()) for _, columns in directions)
    moving = [n for n, moved in enumerate(away) if float(np.abs(moved).max()) > least]
    along = moving[-1] if moving else len(directions) - 1
    length = float((away[along] ** 2).sum()) or 1.0
    bytes = directions[along].bytes
    for n, direction in enumerate(directions):
        if n != along:
            bytes = bytes + float((away[n] * away[along]).sum()) / length * direction.bytes
    return Direction(bytes, directions[along].columns)


def _sum(terms: Any) -> Floats:
    """Return the sum of arrays; a single array unchanged."""
    first, *others = terms
    for other in others:
        first = first + other
    return np.asarray(first)
