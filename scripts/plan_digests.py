"""Print the digests of plans for many profiles, topologies and settings.

    python -m scripts.plan_digests [--only TEXT]

A line per plan: its case, and the SHA-256 of all files of its folder, plan.json included. Two
versions of the planner, two processors or two loads make the same plans if the lines are equal;
tests/planner/test_one_plan_everywhere.py compares them over the kernels that NumPy and OpenBLAS
choose from. The profiles contain only whole numbers, so they do not depend on the processor
themselves.
"""

import argparse
import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from oper.base.arrays import Ints
from oper.base.errors import OperError, OperWarning
from oper.cost.workload import Fetch, Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile, in_order
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology

SAMPLES = 20_000
MODES: tuple[Literal["training", "inference"], ...] = ("training", "inference")


@dataclass(frozen=True)
class Case:
    """A plan to make; with `later`, the plan that follows it for other counts."""

    name: str
    profile: Profile
    topology: Topology
    workload: Workload
    settings: PlanSettings
    later: Profile | None = None

    def plan(self) -> Plan:
        made = make_plan(self.profile, self.topology, self.workload, self.settings)
        return made if self.later is None else replan(made, self.later, 10_000).plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="make the plans whose case contains this text")
    only = parser.parse_args().only
    warnings.simplefilter("ignore", OperWarning)
    for case in cases():
        if only in case.name:
            print(f"{case.name:56} {digest(case)}", flush=True)


def digest(case: Case) -> str:
    """Return the digest of all files of the case's plan, or its error."""
    try:
        plan = case.plan()
    except OperError as error:
        return f"{type(error).__name__}: {error}"
    sha256 = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan")
        for path in sorted((Path(folder) / "plan").rglob("*")):
            if path.is_file():
                sha256.update(f"{path.name}\0".encode() + path.read_bytes())
    return sha256.hexdigest()[:32]


def cases() -> Iterator[Case]:
    """Yield small problems of every kind: modes, fetches, aims, unequal ranks, tiers, replans."""
    first, later = profile(seed=1), profile(seed=1, moved=3)
    hot = profile(seed=2, rows=(900, 40), divide=9)
    topologies = {
        "dgx-h100": Topology.load("dgx-h100"),
        "2x4-a100": Topology.load("2x4-a100"),
        "cpu:3": Topology.load("cpu:3"),
        "unequal:4": unequal(4),
        "unequal:8": unequal(8),
        "unequal:2x2": unequal(4, nodes=2),
        "measured:2x2": measured(4, nodes=2),
    }
    for name, topology in topologies.items():
        for mode in MODES:
            fetches: tuple[Fetch, ...] = ("raw", "distinct")
            if topology.nodes > 1:
                fetches = ("distinct", "pooled", "auto")
            for fetch in fetches:
                workload = Workload(mode, fetch, 4096)
                yield Case(f"{name} {mode} {fetch}", first, topology, workload, PlanSettings(0.005))
            workload = Workload(mode, None, 1024)
            if not name.startswith("cpu"):
                yield Case(f"{name} {mode} default", first, topology, workload, PlanSettings())
            again = PlanSettings(0.02)
            yield Case(f"{name} {mode} replan", first, topology, workload, again, later)
            yield Case(f"{name} {mode} few rows", hot, topology, workload, again)
    for mode in MODES:
        workload, tier = Workload(mode, None, 4096), PlanSettings(0.02, tier=("t0",))
        yield Case(f"dgx-a100 {mode} tier", first, Topology.load("dgx-a100"), workload, tier)
        links = PlanSettings(0.02, balance="link")
        yield Case(f"unequal:4 {mode} links", first, topologies["unequal:4"], workload, links)
    window, last = profile(seed=1), profile(seed=1, moved=3)
    in_order([window, last])
    for name in ("dgx-h100", "2x4-a100"):
        twice, workload = topologies[name].with_capacity("2"), Workload("inference", None, 4096)
        yield Case(f"{name} inference windows", last, twice, workload, PlanSettings())


def profile(
    seed: int, rows: tuple[int, ...] = (9000, 700, 60, 1), divide: int = 1, moved: int = 0
) -> Profile:
    """Return a profile of counts that fall as one over the rank, in a random order; every second
    table has bags. `moved` of ten rows have another row's count."""
    random = np.random.default_rng(seed)
    tables = tuple(Table(f"t{t}", n, dim=(16, 64)[t % 2]) for t, n in enumerate(rows))
    bagged = tuple(t % 2 == 1 for t in range(len(tables)))
    counts: list[Ints] = []
    for n in rows:
        count: Ints = 2 * SAMPLES // (np.arange(n) + 1 + n // 100) // divide
        count = random.permutation(count)
        which = np.flatnonzero(random.integers(0, 10, n) < moved)
        count[which] = count[random.permutation(which)]
        counts.append(np.minimum(count, SAMPLES))
    in_samples = [c - c // 3 if has else c for c, has in zip(counts, bagged, strict=True)]
    pairs = []
    for t, count in enumerate(counts):  # bags of one table differ by one id at most
        length, longer = divmod(int(count.sum()), SAMPLES)
        pairs += [(t, length, SAMPLES - longer), (t, length + 1, longer)]
    distinct = np.array([int(n.sum()) for n in in_samples])
    of_bags = [n for n, has in zip(in_samples, bagged, strict=True) if has]
    return Profile(
        tables,
        SAMPLES,
        np.concatenate(counts).astype(np.uint32),
        np.concatenate(of_bags).astype(np.uint32),
        bagged,
        bag_lengths=BagLengths.of_pairs(np.array(pairs), distinct),
    )


def unequal(ranks: int, nodes: int = 1) -> Topology:
    """Return ranks whose links all differ."""
    random = np.random.default_rng(ranks)
    node_of = tuple(r * nodes // ranks for r in range(ranks))
    cost = random.integers(1000, 4000, (ranks, ranks)) / (1000 * 80e9)
    cost[np.not_equal.outer(node_of, node_of)] *= 4
    np.fill_diagonal(cost, 1 / 1_244e9)
    return Topology("unequal", node_of, cost, 72e9, Latency.of_hops(2e-7))


def measured(ranks: int, nodes: int) -> Topology:
    """Return ranks whose links differ by a few per cent, as measured links do."""
    ranks_apart = unequal(ranks, nodes)
    random = np.random.default_rng(ranks)
    cost = np.full((ranks, ranks), 1 / 80e9)
    cost[np.not_equal.outer(ranks_apart.node_of, ranks_apart.node_of)] *= 4
    np.fill_diagonal(cost, 1 / 1_244e9)
    cost *= random.integers(970, 1030, (ranks, ranks)) / 1000
    return replace(ranks_apart, name="measured", link_cost=cost)


if __name__ == "__main__":
    main()
