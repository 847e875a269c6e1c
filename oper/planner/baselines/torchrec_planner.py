"""TorchRec's own planner as a baseline: its real plan, priced by this project's cost model.

In: `Problem`. Out: `Baseline`. The planner gets the tables, the topology, the batch size per rank,
the mean accesses per sample of each feature, and the ranks' capacities, all of them for tables; if
it finds no plan, the least multiple of them at which it does (`torchrec_process.py`, in a process
of its own). The time of planning is that of the `plan` call that finds this plan, without starting
a process, importing torchrec, building the model and looking for the multiple. Its shards become
holder sets: table-wise a table on a rank, row-wise ranges of rows on ranks, data-parallel rows on
all ranks; of a column-wise shard every access fetches the shard's part of the row. So placements
are compared, as if rows were fetched.

TorchRec moves pooled vectors instead. Their bytes per iteration are noted too (`pooled_bytes`),
with b samples per rank, F features of a table, L its accesses per sample, d columns of a shard and
hit_k the part of L that is in rank k's rows, for each reader and each other rank that serves it:

    table-, column-wise   ids b(8L + 8F), output b·d·4·F, gradient the same
    row-wise              ids b(8·hit_k + 8F), output b·d·4·F whatever the hits, gradient the same
    data-parallel         AllReduce 2(M-1)/M · rows · d · 4 on each rank
    table-row-wise        ids as row-wise; the output is reduced inside the owners' node first, so
                          that a reader in another node gets one
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from queue import Empty, Queue
from typing import Any, NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.holder_sets import Sums, everywhere_set, single_owner_sets
from oper.cost.vectors_per_bag import PartAccesses, pooled_of
from oper.planner.baselines.baseline import (
    Baseline,
    Cells,
    ColumnCells,
    NoPlacementError,
    PieceCounts,
    PooledBytes,
    Status,
    TorchRecNotes,
    count_pieces,
)
from oper.planner.problem.problem import Problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

READY = "ready"  # first line of torchrec_process.py; importing that module would import torchrec
_START_SECONDS = 300.0  # importing torchrec takes from 3 to 30
# A shard serves all of a row's accesses, whatever its columns.
COUNTED_WHOLE = ("accesses", "read_rows", "node_rows", "pooled_read_rows")


@dataclass(frozen=True)
class Shard:
    """Rows `first` to `last` (global ids) of `columns` columns of a table, from `first_column` on;
    rank -1: on all."""

    table: int
    sharding: str
    rank: int
    first: int
    last: int
    columns: int
    first_column: int = 0


class ShardCounts(NamedTuple):
    """Rows of each class in pieces that no shard cuts, and the pieces of each shard, from `begin`
    to `end` [shards]."""

    pieces: PieceCounts
    begin: Ints
    end: Ints


def torchrec(problem: Problem, limit_seconds: float) -> Baseline:
    """Return TorchRec's plan.

    Raises:
        NoPlacementError: its planner found no plan within `limit_seconds` from when the model was
            built, or none with 1024 times the capacities, or its process did not start in time.
        OperError: torchrec is not installed.
    """
    return placement_of(problem, ask(request(problem), limit_seconds))


def placement_of(problem: Problem, answer: dict[str, Any]) -> Baseline:
    """Return the placement that TorchRec's planner answered."""
    shards = read_shards(answer["shards"], problem.profile)
    counts = count_shards(problem, shards)
    rows = whole_row_sums(problem, counts)
    kinds = Counter(sharding for sharding, _ in {(s.sharding, s.table) for s in shards})
    notes = TorchRecNotes(
        capacity_factor=answer["capacity_factor"],
        estimate_seconds=answer["estimate_seconds"],
        plan_seconds=answer["seconds"],
        tables=dict(sorted(kinds.items())),
        pooled_bytes=pooled_bytes(problem, shards, rows.accesses),
    )
    return shards_baseline(problem, shards, counts, notes)


def shards_baseline(
    problem: Problem, shards: list[Shard], counts: ShardCounts, notes: TorchRecNotes
) -> Baseline:
    """Return the placement of shards; `counts` are `count_shards`."""
    rows = whole_row_sums(problem, counts)
    return Baseline(
        "torchrec",
        single_owner_sets(problem.ranks) + everywhere_set(problem.ranks),
        group_sums(problem, shards, rows),
        notes=notes,
        planning_seconds=notes.plan_seconds,
        parts=column_parts(problem, shards, rows),
        table_sums=table_sums(problem, shards, rows),
        column_cells=column_cells(problem, shards, counts),
        under=lambda other: shards_baseline(other, shards, count_shards(other, shards), notes),
    )


def request(problem: Problem) -> dict[str, Any]:
    """Return the request to TorchRec's process, as JSON values."""
    topology, profile = problem.topology, problem.profile
    accesses = problem.accesses_of_tables / max(profile.samples, 1)
    tables = []
    for t, (table, per_sample) in enumerate(zip(profile.tables, accesses.tolist(), strict=True)):
        # By number: features may be shared by tables, and names have dots, which TorchRec forbids.
        features = [f"t{t}:{n}" for n in range(len(table.columns))]
        tables.append(
            {
                "name": f"t{t}",
                "rows": table.rows,
                "dim": table.dim,
                "dtype": table.dtype,
                "optimizer": table.optimizer,
                "features": features,
                "pooling_factors": [per_sample / len(features)] * len(features),
            }
        )
    local, same_node, other_node = bandwidths(topology)
    # TorchRec knows nodes of one size only.
    uneven = topology.ranks % topology.nodes
    return {
        "mode": problem.workload.mode,
        "ranks": topology.ranks,
        "ranks_per_node": 1 if uneven else topology.ranks // topology.nodes,
        "capacities": [int(capacity) for capacity in problem.capacity_bytes],
        "batch_size_per_rank": max(problem.workload.batch_size // topology.ranks, 1),
        "local_bandwidth": local,
        "same_node_bandwidth": same_node,
        "other_node_bandwidth": other_node,
        "tables": tables,
    }


def ask(question: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """Run the process on a question; its last answer, which is that of the least capacities.

    It is killed at the limit, counted from when it is ready to plan, or if it is not ready after a
    time that no machine should need.
    """
    command = [sys.executable, "-m", "oper.planner.baselines.torchrec_process"]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            lines = _lines_of(child)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:  # if it is gone, its exit status says why
                json.dump(question | {"parent": os.getpid()}, child.stdin)
            answer = _last_answer(lines, limit_seconds)
            status = 0 if answer is not None else child.wait()
        finally:
            child.kill()
            child.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["no message"]
    if status:
        raise OperError(
            f"TorchRec's planner failed: {said[-1]}. If torchrec is not installed, leave "
            f"`torchrec` out of {option('--methods')}, or install it: see docs/install.md"
        )
    if answer is None:
        reason = "TorchRec's planner found no plan even with 1024 times the ranks' capacities"
        raise NoPlacementError(Status.INFEASIBLE, reason)
    return answer


def _lines_of(child: "subprocess.Popen[str]") -> "Queue[str | None]":
    """Return the lines that a process writes, as they come, and None after the last."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _last_answer(lines: "Queue[str | None]", limit_seconds: float) -> dict[str, Any] | None:
    """Return the last plan that came within the limit; None if the process ended without one."""
    try:
        line = lines.get(timeout=_START_SECONDS)
    except Empty as late:
        reason = f"TorchRec's planner did not start within {_START_SECONDS:g} s"
        raise NoPlacementError(Status.TIME_LIMIT, reason) from late
    deadline = time.monotonic() + limit_seconds
    answer: dict[str, Any] | None = None
    while line is not None:
        if line != READY:
            answer = json.loads(line)
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0.0))
        except Empty as late:
            if answer is not None:
                break
            reason = f"TorchRec's planner took more than {limit_seconds:g} s"
            raise NoPlacementError(Status.TIME_LIMIT, reason, limit_seconds) from late
    return answer


def bandwidths(topology: Topology) -> tuple[float, float, float]:
    """Return the mean bytes/s of local rows, of rows in the same node and in other nodes; without
    such pairs of ranks, the mean of the next nearer kind."""
    local, same_node, other_node = topology.seconds_by_kind()
    return 1 / local, 1 / same_node, 1 / other_node


def read_shards(answer: list[dict[str, Any]], profile: Profile) -> list[Shard]:
    """Return the shards of an answer; all copies of a data-parallel table are one."""
    shards: list[Shard] = []
    for entry in answer:
        t = int(entry["table"].removeprefix("t"))
        table, begin = profile.tables[t], int(profile.offsets[t])
        if entry["offsets"] is not None:
            (row, column), (rows, columns) = entry["offsets"], entry["sizes"]
            first = begin + row
            of_rows = first, first + rows, columns, column
            shards.append(Shard(t, entry["sharding"], entry["rank"], *of_rows))
        elif entry["rank"] == 0:
            shards.append(Shard(t, entry["sharding"], -1, begin, begin + table.rows, table.dim))
    return shards


def whole_row_sums(problem: Problem, counts: ShardCounts) -> Sums:
    """Return the sums of each shard's rows as if it had all columns, one entry per shard."""
    (piece, class_of, rows), begin, end = counts
    cells = Cells(class_of, piece, rows)
    of_piece = cells.sums(problem.classes, int(end.max()))

    def covered(values: Floats) -> Floats:
        before = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(before[end] - before[begin])

    return of_piece.by_row(covered)


def count_shards(problem: Problem, shards: list[Shard]) -> ShardCounts:
    """Count the rows of shards, in one pass over the profile's counters."""
    cuts = np.array([(shard.first, shard.last) for shard in shards], dtype=np.int64)
    first = np.unique(np.concatenate([problem.profile.offsets, cuts.ravel()]))
    begin, end = np.searchsorted(first, cuts).T
    return ShardCounts(count_pieces(problem, first), begin, end)


def column_cells(problem: Problem, shards: list[Shard], counts: ShardCounts) -> ColumnCells:
    """Return the cells of each rank's shards, with the copies on all ranks in the last group."""
    pieces, begin, end = counts
    first = np.searchsorted(pieces.piece, np.arange(int(end.max()) + 1))
    entries = [np.arange(first[b], first[e]) for b, e in zip(begin, end, strict=True)]
    of_shard = np.repeat(np.arange(len(shards)), [len(each) for each in entries])
    at = np.concatenate(entries)
    group = np.array([shard.rank % (problem.ranks + 1) for shard in shards])
    cells = Cells(pieces.class_of[at], group[of_shard], pieces.rows[at])
    return ColumnCells(cells, _shares(problem, shards)[of_shard])


def _shares(problem: Problem, shards: list[Shard]) -> Floats:
    """Return the share of each shard's columns in its rows' bytes, [shards]."""
    tables = [problem.profile.tables[shard.table] for shard in shards]
    return np.array(
        [
            replace(table, dim=shard.columns).row_bytes / table.row_bytes
            for table, shard in zip(tables, shards, strict=True)
        ]
    )


def group_sums(problem: Problem, shards: list[Shard], rows: Sums) -> Sums:
    """Return the sums of each rank's shards and, last, of the copies on all ranks, [M + 1]; `rows`
    are `whole_row_sums`."""
    return _sums(problem, shards, rows, [s.rank for s in shards], problem.ranks + 1)


def table_sums(problem: Problem, shards: list[Shard], rows: Sums) -> Sums:
    """Return `group_sums` of each table in turn, [T * (M + 1)]."""
    sets = problem.ranks + 1
    groups = [s.table * sets + s.rank % sets for s in shards]
    return _sums(problem, shards, rows, groups, sets * len(problem.profile.tables))


def _sums(problem: Problem, shards: list[Shard], rows: Sums, group: list[int], groups: int) -> Sums:
    """Return the sums of `groups` groups; shard n is in `group[n]`, of which -1 is the last."""
    mode = problem.workload.mode
    tables = [problem.profile.tables[shard.table] for shard in shards]
    parts = [replace(table, dim=s.columns) for table, s in zip(tables, shards, strict=True)]
    share = _shares(problem, shards)

    def total(term: str) -> Floats:
        values = getattr(rows, term)
        if term == "memory_bytes":  # a row-wise optimizer keeps its state in every column shard
            values = rows.rows * [part.memory_bytes(mode) for part in parts]
        elif term not in COUNTED_WHOLE:
            values = (values.T * share).T
        sums = np.zeros((groups, *values.shape[1:]))
        np.add.at(sums, group, values)
        return sums

    return Sums(*(total(term.name) for term in fields(Sums)))


def column_parts(problem: Problem, shards: list[Shard], rows: Sums) -> tuple[PartAccesses, ...]:
    """Return the accesses to pooled tables, of all tables' first columns, their second ones, and so
    on, as far as they are cut; `rows` are `whole_row_sums`."""
    profile, pooled = problem.profile, pooled_of(problem.topology, problem.profile.tables)
    if not pooled.any():
        return ()
    a_rank = problem.workload.batch_size / problem.ranks / max(profile.samples, 1)
    begins: dict[int, list[int]] = {}
    for table, column in sorted({(shard.table, shard.first_column) for shard in shards}):
        begins.setdefault(table, []).append(column)
    shape = len(profile.tables), problem.ranks + 1
    tables = [[*profile.tables] for _ in range(max(map(len, begins.values())))]
    accesses = [np.zeros(shape) for _ in tables]
    for shard, read in zip(shards, (rows.pooled_read_rows / a_rank).tolist(), strict=True):
        part = begins[shard.table].index(shard.first_column)
        tables[part][shard.table] = replace(profile.tables[shard.table], dim=shard.columns)
        accesses[part][shard.table, shard.rank] += read  # the last set if it is on all ranks
    return tuple(map(PartAccesses, tables, accesses))


def pooled_bytes(problem: Problem, shards: list[Shard], hits: Floats) -> PooledBytes:
    """Return the bytes between ranks per iteration, summed over ranks, as TorchRec moves them;
    `hits` are the accesses in the log of each shard's rows."""
    topology, profile = problem.topology, problem.profile
    ranks, batch = topology.ranks, problem.workload.batch_size / topology.ranks
    node_of = np.asarray(topology.node_of)
    ids = outputs = allreduce = 0.0
    for shard, hit in zip(shards, (hits / max(profile.samples, 1)).tolist(), strict=True):
        table = profile.tables[shard.table]
        features = len(table.columns)
        vectors = batch * shard.columns * 4 * features
        if shard.rank < 0:
            allreduce += ranks * 2 * (ranks - 1) / ranks * table.rows * table.dim * 4
            continue
        others = ranks - 1
        ids += others * batch * (8 * hit + 8 * features)
        if shard.sharding in ("table_row_wise", "grid_shard"):
            in_node = int((node_of == node_of[shard.rank]).sum())
            # Every rank of the node sends its part of the others' sums; then one sum leaves it.
            outputs += vectors * ((in_node - 1) * ranks + (ranks - in_node)) / in_node
        else:
            outputs += others * vectors
    gradients = outputs if problem.workload.training else 0.0
    allreduce = allreduce if problem.workload.training else 0.0
    return PooledBytes(ids, outputs, gradients, allreduce)
