"""Count the files of a log on the ranks that torchrun started, and sum the counts on rank 0.

Rank r of W counts files r, r + W, …, and the counters are summed on rank 0 over gloo, chunk by
chunk, so that hosts need to share neither memory nor a file system. Every wait has a deadline, and
its error names the ranks that are missing. A rank that fails tells the others, which raise its
error as soon as they wait.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from oper.base.arrays import Counts
from oper.base.errors import OperError, OperWarning, first_line
from oper.base.spoken import option
from oper.files.storage import atomic_folder, check_output, scratch_folder
from oper.logs import Log, LogOptions, Prepared, RowReader, open_log
from oper.profiling.counter_arrays import samples_with_row_offsets
from oper.profiling.counting import CountOptions, count, provenance
from oper.profiling.distinct_rows import DistinctSums
from oper.profiling.profile import FORMAT, Profile
from oper.profiling.row_counters import Memory
from oper.profiling.table_options import TableOptions
from oper.tables.bag_lengths import BagLengths

_ERROR, _HEARD = "oper/error", "oper/heard"  # keys in the group's store
_HEARD_SECONDS = 5.0  # for waiting ranks to read the error; ranks that count learn of it later
_CHUNK_ROWS = 1 << 23  # 64 MiB of int64 at a time, little next to the counters


def count_under_torchrun(
    paths: Any,
    log_options: LogOptions,
    tables: TableOptions,
    options: CountOptions,
    output: Path,
    deadline_seconds: float,
    overwrite: bool = False,
) -> Profile | None:
    """Count the log's files into the profile folder `output`, which rank 0 writes and returns.

    Raise OperError if there are fewer files than ranks, a rank is lost or late, or `output` is
    taken.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The group comes first, so that a rank that refuses something can tell the others.
    with _group(rank, deadline_seconds) as group:
        if rank == 0:  # The other ranks write nothing.
            check_output(output, FORMAT, overwrite)
        with warnings.catch_warnings():
            if rank > 0:  # Rank 0 tells of the files for all.
                warnings.simplefilter("ignore", OperWarning)
            log = open_log(paths, log_options)
        if len(log.names) < ranks:
            raise OperError(
                f"expected at least one file of the log per rank, got {len(log.names)} for {ranks} "
                "ranks, which count whole files: start at most as many ranks as files, or split "
                "the log into more files"
            )
        if log_options.rows is not None:
            raise OperError(
                f"{option('--rows')}: works in one process only; under torchrun pass the files to "
                "count"
            )
        log_part = log.part(rank, ranks)
        prepared = tables.prepare(log_part)
        group.barrier()
        prepared = _agreed_tables(prepared, log, tables)
        with scratch_folder(output) as folder:
            part = count(RowReader(log_part, prepared), options, prepared=prepared, folder=folder)[
                0
            ]
            group.barrier()
            if rank > 0:
                _sum(part, None, Memory())
                return None
            with atomic_folder(output, FORMAT, overwrite) as target:
                whole = _sum(part, target, Memory(options.limit_bytes))
                assert whole is not None, "rank 0 has the sum"
                whole.source |= provenance(log, prepared.left_out)
                prepared.save_vocabularies(target)
                whole.write(target)
    return whole


@dataclass(frozen=True)
class _Group:
    rank: int
    limit: timedelta

    def barrier(self) -> None:
        """Wait for all ranks; the error names those that do not arrive."""
        dist.monitored_barrier(timeout=self.limit, wait_all_ranks=True)


@contextmanager
def _group(rank: int, deadline_seconds: float) -> Iterator[_Group]:
    """Make the ranks a gloo group; an error of one rank ends the waits of the others."""
    limit = timedelta(seconds=deadline_seconds)
    try:
        dist.init_process_group("gloo", timeout=limit)
        yield _Group(rank, limit)
    except RuntimeError as error:
        raise OperError(
            _told(rank)
            or f"rank {rank} lost another rank, or waited {deadline_seconds:,.0f} s for it: "
            f"{first_line(error)}; see the messages of the other ranks, or allow more time with "
            f"{option('--deadline')}"
        ) from error
    except BaseException as error:
        _tell(rank, error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _tell(rank: int, error: BaseException) -> None:
    """Leave an error of this rank in the group's store, and disconnect, which wakes the others."""
    kind = "" if isinstance(error, OperError) else f"{type(error).__name__}: "
    store, ranks = _store(), dist.get_world_size()
    with suppress(RuntimeError):  # The store may be gone with the rank that serves it.
        store.set(_ERROR, f"rank {rank} failed: {kind}{error}")
        store.set(f"{_HEARD}/{rank}", "")
        dist.destroy_process_group()
        if rank == 0:  # It may serve the store.
            others = [f"{_HEARD}/{other}" for other in range(1, ranks)]
            store.wait(others, timedelta(seconds=_HEARD_SECONDS))


def _told(rank: int) -> str:
    """Return the error that another rank left; "" if none did."""
    with suppress(RuntimeError, ValueError):
        store = _store()
        text = str(store.get(_ERROR).decode()) if store.check([_ERROR]) else ""
        store.set(f"{_HEARD}/{rank}", "")
        return text
    return ""


def _store() -> Any:
    """Return the store of the group."""
    group: Any = dist.group.WORLD
    return group.get_group_store()


def _agreed_tables(prepared: Prepared, log: Log, tables: TableOptions) -> Prepared:
    """Return the tables with rows for all ranks' ids; from the whole log if vocabularies differ."""
    digest = torch.frombuffer(bytearray(_digest(prepared)), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    if any(not torch.equal(digest, other) for other in digests):
        return tables.prepare(log)
    rows = torch.tensor([table.rows for table in prepared.tables])
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    enough = [replace(t, rows=r) for t, r in zip(prepared.tables, rows.tolist(), strict=True)]
    return replace(prepared, tables=tuple(enough))


def _digest(prepared: Prepared) -> bytes:
    """Return the SHA-256 of the tables and their vocabularies, without the numbers of rows."""
    digest = hashlib.sha256()
    for table in prepared.tables:
        digest.update(repr(replace(table, rows=1)).encode())
    return digest.digest()


def _sum(part: Profile, folder: Path | None, memory: Memory) -> Profile | None:
    """Return the sum of all ranks' profiles on rank 0, None on the others.

    Counters beyond the memory limit are in `folder`.
    """
    first = dist.get_rank() == 0
    flags = torch.tensor(part.bagged, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    bagged = tuple(bool(flag) for flag in flags.tolist())
    skipped = part.source.get("skipped_ids", {})
    totals = np.array(
        [part.samples, int(part.accesses.max()), *(skipped.get(t.name, 0) for t in part.tables)]
    )
    _reduce(totals, totals)
    # The sum of the ranks' largest counters bounds every counter of the sum.
    dtype = np.uint32 if totals[1] <= np.iinfo(np.uint32).max else np.uint64
    starts = samples_with_row_offsets(part.tables, bagged)
    accesses: Any = np.zeros(0, dtype)
    samples_with_row: Any = accesses
    if first:
        accesses = memory.new(part.rows, dtype, folder, "accesses.npy")
        samples_with_row = memory.new(int(starts[-1]), dtype, folder, "samples_with_row.npy")
    _reduce(part.accesses, accesses)
    for table in np.flatnonzero(bagged).tolist():
        _reduce(
            part.table_samples_with_row(table), samples_with_row[starts[table] : starts[table + 1]]
        )
    measured = _reduce_distinct(part)
    bag_lengths = _gather_bag_lengths(part)
    if not first:
        return None
    whole = Profile(
        part.tables,
        int(totals[0]),
        accesses,
        samples_with_row,
        bagged,
        vocabularies=part.vocabularies,
        bag_lengths=bag_lengths,
    )
    names = [table.name for table in part.tables]
    skipped_ids = {n: int(k) for n, k in zip(names, totals[2:], strict=True) if k}
    if skipped_ids:
        whole.source["skipped_ids"] = skipped_ids
    if "sampled" in part.source:
        whole.source["sampled"] = {"share": part.source["sampled"]["share"]}
    if measured is not None:
        whole.distinct = measured.against(whole)
    return whole


def _reduce(mine: Counts | NDArray[Any], total: Any) -> None:
    """Sum arrays of integers over the ranks, into `total` on rank 0."""
    for start in range(0, len(mine), _CHUNK_ROWS):
        chunk = torch.from_numpy(mine[start : start + _CHUNK_ROWS].astype(np.int64))
        dist.reduce(chunk, dst=0)
        if dist.get_rank() == 0:
            total[start : start + _CHUNK_ROWS] = chunk.numpy()


def _reduce_distinct(part: Profile) -> DistinctSums | None:
    if part.distinct is None:
        return None
    sums = DistinctSums.of([part.distinct])
    assert sums is not None, "a single measurement has one batch size"
    flat = torch.from_numpy(np.concatenate([[sums.batches], sums.rank_rows, sums.union_rows]))
    dist.reduce(flat, dst=0)
    sums.batches = int(flat[0])
    sums.rank_rows, sums.union_rows = np.split(flat[1:].numpy(), 2)
    return sums


def _gather_bag_lengths(part: Profile) -> BagLengths | None:
    """Return the sum of all ranks' lengths of bags on rank 0, None on the others."""
    assert part.bag_lengths is not None, "it was counted by this version of oper"
    distinct = torch.from_numpy(part.bag_lengths.distinct.copy())
    dist.reduce(distinct, dst=0)
    pairs = torch.from_numpy(part.bag_lengths.pairs)
    most = torch.tensor(len(pairs))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    # Pairs of 0 bags, which the sum leaves out, fill up those of ranks that have fewer.
    padded = torch.zeros((int(most), pairs.shape[1]), dtype=torch.int64)
    padded[: len(pairs)] = pairs
    if dist.get_rank() != 0:
        dist.gather(padded)
        return None
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.gather(padded, parts)
    return BagLengths.of_pairs(torch.cat(parts).numpy(), distinct.numpy())
