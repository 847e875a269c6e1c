"""Vectors per bag between nodes: expected from lengths and shares, compared with counted on a log.

Each real log with bags is profiled but for its last fifth. Rows are striped over the nodes by their
ids, or lie where a plan puts them, in inference with so many copies, which are of hot rows on all
ranks. A vector is a bag and another node than the reader's that has any of its rows, on average
over the reading ranks.
`independent` expects them with all ids of a bag independent, `repeats` with the repeated rows that
the profile counted (oper/cost/vectors_per_bag.py). Errors are relative to what is counted, on the
part that was profiled. On the last fifth, `repeats there` takes lengths and shares from there and
the share of repeats from the profile, and `all foreseen` takes everything from the profile, so that
lengths that drift show as well.

    python -m benchmarks.planning.bags [--json]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

import oper
from benchmarks.common import LOGS, REAL_LOGS, parser, publish
from oper.base.arrays import Floats, Ints
from oper.checker.bag_vectors import (
    SourceNodes,
    bags_by_node,
    source_nodes,
    vectors_between_nodes,
)
from oper.cli.shared.console import new_table
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths
from oper.topology.topology import Topology

Readers = Callable[[Ints], SourceNodes]  # from where rows are read

NODES = (2, 4, 16)
RANKS_PER_NODE = 4
SAMPLES_PER_RANK = 256
# Modes and copies. In inference the copies are of the hottest rows, on all ranks.
PLANS: tuple[tuple[Literal["inference", "training"], float], ...] = (
    ("training", 0.05),
    ("inference", 0.01),
    ("inference", 0.20),
)


@dataclass(frozen=True)
class Bags:
    """The bags of a log's one table: rows one bag after the other, and the lengths of the bags."""

    rows: Ints
    lengths: Ints

    def split(self, bags: int) -> "tuple[Bags, Bags]":
        """The first `bags` of them, and the others."""
        ids = int(self.lengths[:bags].sum())
        first = Bags(self.rows[:ids], self.lengths[:bags])
        return first, Bags(self.rows[ids:], self.lengths[bags:])


def bags_of(path: str, reading: Any, profile: Profile) -> Bags:
    batches = list(oper.read(LOGS / path, profile.tables, **reading))
    (name,) = batches[0].features
    return Bags(
        np.concatenate([batch.features[name].values for batch in batches]).astype(np.int64),
        np.concatenate([np.diff(batch.features[name].offsets()) for batch in batches]),
    )


def places(profile: Profile, nodes: int) -> Iterator[tuple[str, Topology, Readers]]:
    """Where rows may lie, and by which nodes' ranks they are read from where."""
    topology = Topology.load(f"{nodes}x{RANKS_PER_NODE}-a100")
    node_of = np.array(topology.node_of)
    alike = np.zeros(len(node_of), dtype=np.int64)
    yield "striped", topology, lambda rows: SourceNodes((rows % nodes)[None], alike)
    batch = SAMPLES_PER_RANK * len(node_of)
    for mode, copies in PLANS:
        settings = oper.PlanSettings(extra_memory=copies)
        workload = oper.Workload(mode, "distinct", batch)
        layout = oper.make_plan(profile, topology, workload, settings).layout
        name = f"{mode}, {copies:.0%}"
        yield name, topology, partial(source_nodes, layout, node_of, 0)


def expected(vectors: VectorsPerBag, weights: Floats, source: SourceNodes, node_of: Ints) -> float:
    """Vectors a bag, on average over ranks, where rows with these weights are read."""
    nodes = int(node_of.max()) + 1
    counts = [np.bincount(each, weights, minlength=nodes) for each in source.nodes]
    chances = np.concatenate([vectors.chances(each[None] / weights.sum()) for each in counts])
    of_rank = chances[source.kind]
    own = of_rank[np.arange(len(node_of)), node_of]
    return float((of_rank.sum(axis=1) - own).mean())


def measure(name: str, path: str, reading: Any) -> Iterator[dict[str, Any]]:
    """A line for each number of nodes and place of the rows."""
    profile = oper.profile(LOGS / path, hold_out="20%", **reading)
    last = profile.following
    assert last is not None, "a part was held out"
    lengths, lengths_there = profile.bag_lengths, last.bag_lengths
    assert lengths is not None, "they were counted by this version of oper"
    assert lengths_there is not None, "they were counted by this version of oper"
    parts = bags_of(path, reading, profile).split(profile.samples)
    independent = VectorsPerBag(with_new_share(lengths, 1.0))
    repeats = VectorsPerBag(lengths)
    there = VectorsPerBag(with_new_share(lengths_there, float(lengths.new_shares[0])))
    accesses, in_bags, in_bags_there = (
        counters.astype(np.float64)
        for counters in (
            profile.accesses,
            profile.table_samples_with_row(0),
            last.table_samples_with_row(0),
        )
    )
    for nodes in NODES:
        for place, topology, readers in places(profile, nodes):
            node_of = np.array(topology.node_of)
            source = readers(np.arange(profile.rows))
            counted, counted_there = (
                float(vectors_between_nodes(bags, node_of).mean()) / len(part.lengths)
                for part in parts
                for bags in [bags_by_node(readers(part.rows), part.lengths, nodes)]
            )
            yield {
                "log": name,
                "nodes": nodes,
                "rows": place,
                "counted": counted,
                "independent": expected(independent, accesses, source, node_of) / counted - 1,
                "repeats": expected(repeats, in_bags, source, node_of) / counted - 1,
                "repeats_there": expected(there, in_bags_there, source, node_of) / counted_there
                - 1,
                "all_foreseen": expected(repeats, in_bags, source, node_of) / counted_there - 1,
            }


def with_new_share(lengths: BagLengths, share: float) -> BagLengths:
    """The lengths with another share of new rows among the ids after a bag's first."""
    more = lengths.ids_of_tables - lengths.filled_bags
    return replace(lengths, distinct=lengths.filled_bags + np.rint(share * more).astype(np.int64))


def table(lines: list[dict[str, Any]]) -> Any:
    """A line for each log, number of nodes and place."""
    errors = ("independent", "repeats", "repeats_there", "all_foreseen")
    headers = ("independent", "repeats", "repeats there", "all foreseen")
    made = new_table("log", "nodes", "rows", "vectors a bag", *headers)
    for line in lines:
        shown = [f"{line[error]:+.1%}" for error in errors]
        made.add_row(
            line["log"], str(line["nodes"]), line["rows"], f"{line['counted']:.3f}", *shown
        )
    return made


def main() -> None:
    given = parser(__doc__).parse_args()
    bagged = {name: log for name, log in REAL_LOGS.items() if "lengths" in log[1]}
    lines = [
        line
        for name, (path, reading) in bagged.items()
        if (LOGS / path).exists()
        for line in measure(name, path, reading)
    ]
    publish(given, {"lines": lines}, lambda: table(lines))


if __name__ == "__main__":
    main()
