"""A placement for pooled fetches: rows of other nodes are added up there, and travel as vectors.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. The cost of a row of another
node depends on the number of rows of its bag there: the more rows are replicated, the fewer are
left in a bag to be added up, and the more of a vector each of them costs.

On homogeneous ranks copies are chosen table by table (pooled_copies.py), and all other rows of a
table lie on its home (homes.py). On other ranks, and in inference as a second try, tables are
spread over all nodes: placement and bytes of vectors for a byte of rows
(oper/cost/vectors_per_bag.py) are found in turns, from both ends: a bag's rows all elsewhere, and
each of them a vector of its own; and the placement with the shorter iteration is taken. In
inference it is the shorter step that decides: with few homes some nodes serve rows while others
receive vectors, and each phase waits for its slowest. All are priced by the shares of each table's
accesses that their nodes have. The certificate is for every placement: it takes each row of a table
to be on one node, whose vector all of a bag share.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.formatting import plural
from oper.base.portable_math import dot
from oper.base.spoken import option
from oper.cost.holder_sets import HolderSets
from oper.cost.vectors_per_bag import pooled_of, vector_ratios
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.bounds.certify import certify
from oper.planner.bounds.pooled_bound import pooled_bound
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.homes import Homes, choose_homes
from oper.planner.class_placement.homogeneous_replicas import Levels, replica_sets
from oper.planner.class_placement.partitions import partitions
from oper.planner.class_placement.pooled_copies import (
    PooledCopies,
    Supposed,
    choose_copies,
    enough_extra_bytes,
    least_mean_seconds,
    may_copy_to_nodes,
    table_of_class,
)
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import (
    TOLERANCE,
    bound_seconds,
    by_devices,
    modest_share,
    place_in_memory,
    shares_up_to,
)
from oper.planner.make_placement import Planned, Watch, within_limits
from oper.planner.predict_step import predict_step, predict_step_of
from oper.planner.price_plan import (
    expected_accesses,
    shares_of_nodes,
    with_vectors,
)
from oper.planner.problem.problem import Problem, make_problem
from oper.planner.row_placement.row_placement import RESERVE_SHARE, RowPlacement
from oper.planner.row_placement.rows_at_homes import place_at_homes
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.relays import relayed
from oper.topology.topology import Topology
from oper.topology.transports import NVSHMEM

# The load of the nodes of tables above the mean over nodes, when copies are chosen.
_LOADS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_PROMISING = 4  # supposed places whose homes are improved before one is taken
_TURNS = 4
_SETTLED = 1e-3  # relative: ratios that differ by less are one
# With ranks of a node further from even than the first, more rows are listed: that share of all.
_RESERVES = ((0.0, RESERVE_SHARE), (2e-4, 1 / 8), (1e-3, 1.0))


def place_pooled(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
    tables: frozenset[str] | None = None,
) -> Planned:
    """Plan for all rows of `profile`, of which `tables` are pooled, by name (all), and the others
    fetched as `workload` says; `report` is called with the name of each step as it begins.

    Raises OperError if the profile does not know the lengths of bags, the ranks cannot hold the
    tables, or all are to be pooled and some have no pooling.
    """
    check_transport(topology)
    if tables is None:
        check_all_poolable(profile)
    lengths = known_lengths(profile)
    workload = workload.on(topology.nodes)
    topology = relayed(topology, workload.fetch == "distinct")
    at_homes = None
    if topology.homogeneous and asked.balance == "time":
        watch = Watch(report)
        arguments = (profile, topology, workload, asked, lengths, tables, watch)
        at_homes = _at_homes(*arguments)
        if at_homes is not None and workload.training:
            placed = at_homes.row_placement
            if not placed.sums.rows[placed.holder_sets.on_some].any():
                return at_homes
            # T, the sum of a rank's phases, may be less and the step, whose phases wait for the
            # slowest rank, longer.
            without = _at_homes(*arguments, a_node=False)
            return min((p for p in (at_homes, without) if p is not None), key=predicted_seconds)
    if at_homes is not None and copies_everything(at_homes):
        return at_homes
    spread = _over_all_nodes(profile, topology, workload, asked, lengths, tables, report)
    return spread if at_homes is None else min(at_homes, spread, key=predicted_seconds)


def copies_everything(planned: Planned) -> bool:
    """Return whether each rank has a copy of each row, so that nothing travels in inference."""
    problem = planned.problem
    return planned.cost.extra_bytes >= (problem.ranks - 1) * problem.classes.total_bytes


def predicted_seconds(planned: Planned) -> float:
    """Return the predicted seconds of a step."""
    return predict_step_of(planned.problem, planned.row_placement).seconds


def check_transport(topology: Topology) -> None:
    """Raise OperError if rows of other nodes are read by kernels, each for itself."""
    if topology.transport == NVSHMEM:
        raise OperError(
            f"fetch pooled: the topology's transport is {NVSHMEM}, by which kernels read rows of "
            f"other nodes, each for itself: leave {option('--fetch')} out, or plan without the "
            "transport"
        )


def check_all_poolable(profile: Profile) -> None:
    """Raise OperError if all tables are to be pooled and some have no pooling."""
    unpooled = [table.name for table in profile.tables if table.pooling == "none"]
    if unpooled:
        raise OperError(
            f"fetch pooled: {plural(len(unpooled), 'table')} without pooling ({unpooled[0]}): "
            f"their rows are not added up; plan with {option('--fetch', 'auto')}, which pools the "
            "others where that is shorter"
        )


def known_lengths(profile: Profile) -> BagLengths:
    """Return the bag lengths of a profile. Raise OperError if it has none."""
    if profile.bag_lengths is None:
        raise OperError(
            "fetch pooled or auto: the profile does not say how long bags are, as older ones do "
            "not; profile the log again"
        )
    return profile.bag_lengths


def unplaced(
    profile: Profile, topology: Topology, training: bool, tables: frozenset[str] | None
) -> PooledTopology:
    """Return the topology with these pooled tables before any row is placed: with the most that
    vectors can cost, so that limits leave room for enough copies, and the least."""
    lengths = profile.bag_lengths
    assert lengths is not None
    ranks = PooledTopology.of(topology, 1.0, 1.0, training, tables)
    pooled = pooled_of(ranks, profile.tables)
    nowhere = np.zeros(lengths.tables)
    least = vector_ratios(lengths, profile.tables, topology.nodes, nowhere, pooled).least
    return ranks.with_ratio(max(1.0, least), least)


def draft_step_seconds(problem: Problem) -> float:
    """Estimate the step, in seconds, by the homes and copies of drafts, as if the ranks of a node
    were even."""
    lengths, classes, topology = problem.profile.bag_lengths, problem.classes, problem.topology
    assert lengths is not None
    steps = []
    for spread in (1, topology.nodes):
        copies, homes = _with_homes(problem, lengths, Supposed(spread), improve=False)
        levels = Levels(copies.a_node, copies.everywhere)
        ranks = without_pooling(topology)
        sets, replicas = replica_sets(classes, ranks, problem.workload, levels)
        shares = homes.of_ranks(np.array(topology.node_of))[table_of_class(classes)]
        single = (classes.rows - replicas.sum(axis=1))[:, None] * shares
        counts = np.concatenate([single, replicas], axis=1)
        sums = classes.sums(counts)
        method = problem.price(sets, sums).allreduce_method
        priced = with_vectors(problem, sets, expected_accesses(problem, counts), sums)
        steps.append(predict_step(priced, sets, counts, method).seconds)
    return min(steps)


def _at_homes(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    lengths: BagLengths,
    tables: frozenset[str] | None,
    watch: Watch,
    a_node: bool = True,
) -> Planned | None:
    """Return the plan whose tables have homes, in training with copies on each node if they pay and
    `a_node` allows them; None if its limits are not kept."""
    ranks = unplaced(profile, topology, workload.training, tables)
    with watch("classes"):
        problem = make_problem(profile, ranks, workload, asked, by_table=True)
    full = None
    if by_devices(topology, asked):
        with watch("memory"):
            limits = DeviceLimits.of(problem)
            most = limits.beside_most_replicas(limits.most_extra)
            full = least_mean_seconds(most, lengths, most.budget_bytes)
            problem = _in_least_memory(limits, most, lengths, a_node)
    with watch("draft"):
        copies, homes = _with_homes(problem, lengths, _supposed(problem, lengths, a_node))
        levels = Levels(copies.a_node, copies.everywhere)
        sets, replicas = replica_sets(problem.classes, topology, workload, levels)
        placement = _class_placement(problem, sets, replicas)
    for uneven, share in _RESERVES:
        with watch("rows"):
            rows = place_at_homes(problem, sets, replicas, homes, share)
        if _unevenness(problem, rows) <= uneven:
            break
    if not within_limits(problem, rows.cost):
        return None
    with watch("bound"):
        planned = _priced(problem, placement, rows, ranks.least_ratio, lengths)
    certificate = replace(planned.certificate, full_memory_bound_seconds=full)
    return replace(planned, certificate=certificate, seconds=watch.seconds)


def _in_least_memory(
    limits: DeviceLimits, most: Problem, lengths: BagLengths, a_node: bool
) -> Problem:
    """Return the problem with the least extra memory with which T is estimated to be longer by
    TOLERANCE, at most, than with that of `most`."""
    shares = shares_up_to(limits.most_extra)
    modest = modest_share(limits, shares)
    if modest == len(shares) - 1:
        return limits.within(shares[modest])
    supposed = _supposed(most, lengths, a_node)

    def seconds(problem: Problem) -> float:
        copies, homes = _with_homes(problem, lengths, supposed)
        return copies.copy_seconds + homes.seconds

    longest = seconds(most) * (1 + TOLERANCE)
    enough = enough_extra_bytes(most, lengths, most.budget_bytes, TOLERANCE, supposed)
    extra = choose_copies(most, lengths, most.budget_bytes, supposed).extra_bytes
    total = max(most.classes.total_bytes, 1)
    low, high = (min(bisect_left(shares, b / total), len(shares) - 1) for b in (enough, extra))
    low = max(low, modest)
    least = bisect_left(
        range(low, high), True, key=lambda i: seconds(limits.within(shares[i])) <= longest
    )
    return limits.within(shares[low + least])


def _supposed(problem: Problem, lengths: BagLengths, a_node: bool) -> Supposed:
    """Return the assumption on rows with one owner that makes T least if copies are chosen by it
    and rows get homes. Fewer tables than nodes cannot be even if each lies on one node: then more
    of their rows have copies, or the tables share nodes."""
    nodes = problem.topology.nodes
    spreads = [1]
    while spreads[-1] < nodes:
        spreads.append(min(2 * spreads[-1], nodes))
    either = a_node and problem.workload.training and may_copy_to_nodes(problem.topology)
    copied = (True, False) if either else (False,)
    loads = [load for load in _LOADS if load <= nodes]
    tried = [Supposed(*each) for each in product(spreads, loads, copied)]

    def seconds(supposed: Supposed, improve: bool = False) -> float:
        copies, homes = _with_homes(problem, lengths, supposed, improve)
        return copies.copy_seconds + homes.seconds

    if not problem.workload.training:
        copies = choose_copies(problem, lengths, problem.budget_bytes, tried[0])
        if (copies.everywhere + copies.a_node == problem.classes.rows).all():
            return tried[0]  # All rows have copies there, and more so with a higher load.
    promising = sorted(tried, key=seconds)[:_PROMISING]
    return min(promising, key=lambda supposed: seconds(supposed, improve=True))


def _with_homes(
    problem: Problem, lengths: BagLengths, supposed: Supposed, improve: bool = True
) -> tuple[PooledCopies, Homes]:
    """Return copies, and homes for all other rows, improved or drafts."""
    copies = choose_copies(problem, lengths, problem.budget_bytes, supposed)
    a_node = problem.ranks / problem.topology.nodes
    held = float(dot(problem.classes.m, copies.everywhere + copies.a_node / a_node))
    room = float(problem.capacity_bytes.min() - held) * a_node
    single = problem.classes.rows - copies.everywhere - copies.a_node
    return copies, choose_homes(problem, lengths, single, room, improve)


def _class_placement(problem: Problem, sets: HolderSets, replicas: Ints) -> ClassPlacement:
    """Return the copies of rows of each class, [C, G - M], all others left to be placed."""
    none = np.zeros((len(problem.classes), problem.ranks), dtype=np.int64)
    return ClassPlacement(
        step="homes",
        holder_sets=sets,
        counts=np.concatenate([none, replicas], axis=1),
        striped=problem.classes.rows - replicas.sum(axis=1),
        shares=problem.shares,
        partitions=partitions(problem.classes, problem.asked.threshold),
    )


def _unevenness(problem: Problem, rows: RowPlacement) -> float:
    """Return the relative excess of the largest T over the largest mean of a node's ranks."""
    seconds, node_of = rows.cost.rank_seconds, np.array(problem.topology.node_of)
    means = np.bincount(node_of, seconds) / np.bincount(node_of)
    return float(seconds.max() / means.max() - 1) if means.max() > 0 else 0.0


def _over_all_nodes(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    lengths: BagLengths,
    tables: frozenset[str] | None,
    report: Callable[[str], None],
) -> Planned:
    """Return the plan whose tables are spread over all nodes."""
    unknown = unplaced(profile, topology, workload.training, tables)
    which = pooled_of(unknown, profile.tables)

    def pooled(local_shares: Floats) -> PooledTopology:
        ratios = vector_ratios(lengths, profile.tables, topology.nodes, local_shares, which)
        return unknown.with_ratio(ratios.even, ratios.least)

    placements: list[Planned] = []
    nowhere, everywhere = np.zeros(lengths.tables), np.ones(lengths.tables)
    for start in (nowhere, everywhere):
        ranks = pooled(start)
        for _ in range(_TURNS):
            planned = place_in_memory(profile, ranks, workload, asked, report, by_table=True)
            settled = float(ranks.vector_ratio.mean())
            ranks = pooled(1 - node_shares(planned.problem, planned.row_placement).sum(axis=1))
            if abs(float(ranks.vector_ratio.mean()) - settled) <= _SETTLED * settled:
                break
        full = planned.certificate.full_memory_bound_seconds
        made = _priced(
            planned.problem,
            planned.class_placement,
            planned.row_placement,
            ranks.least_ratio,
            lengths,
        )
        certificate = replace(made.certificate, full_memory_bound_seconds=full)
        placements.append(replace(made, certificate=certificate, seconds=planned.seconds))
    best = min(placements, key=lambda candidate: candidate.cost.objective_seconds)
    if best.certificate.full_memory_bound_seconds is None:
        return best
    # With all memory that the devices have, too, the least that any placement can cost.
    limits = DeviceLimits.of(
        make_problem(profile, pooled(nowhere).bounding, workload, asked, by_table=True)
    )
    full = pooled_bound(limits.within(limits.most_extra))
    if not (workload.training and may_copy_to_nodes(topology)):  # of which this bound knows nothing
        full = max(full, bound_seconds(limits, limits.most_extra))
    return replace(best, certificate=replace(best.certificate, full_memory_bound_seconds=full))


def _priced(
    problem: Problem,
    placement: ClassPlacement,
    rows: RowPlacement,
    least_ratio: float,
    lengths: BagLengths,
) -> Planned:
    """Return a placement priced by the vectors of its own bags, and certified for these costs."""
    topology = problem.topology
    assert isinstance(topology, PooledTopology)
    problem = replace(problem, topology=topology.with_ratio(topology.vector_ratio, least_ratio))
    problem, rows = with_own_vectors(problem, rows)
    certificate = certify(problem, rows.cost.objective_seconds)
    return Planned(problem, placement, rows, certificate)


def with_own_vectors(problem: Problem, rows: RowPlacement) -> tuple[Problem, RowPlacement]:
    """Return the problem with the vectors that bags of pooled tables need of these rows, and the
    rows priced in it."""
    accesses = _expected_accesses(problem, rows)
    problem = with_vectors(problem, rows.holder_sets, accesses, rows.sums)
    return problem, replace(rows, cost=problem.price(rows.holder_sets, rows.sums))


def node_shares(problem: Problem, rows: RowPlacement) -> Floats:
    """Return the share of each table's accesses that a rank of another node makes to rows of each
    node, the mean over those ranks, [T, N]."""
    accesses = _expected_accesses(problem, rows)
    return shares_of_nodes(problem, rows.holder_sets, accesses)


def _expected_accesses(problem: Problem, rows: RowPlacement) -> Floats:
    """Return `expected_accesses` to all rows of each holder set, [T, G], striped ones too."""
    accesses = expected_accesses(problem, rows.counts)
    accesses[:, : problem.ranks] += rows.scan.striped_expected
    return accesses
