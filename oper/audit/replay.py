"""Replay a log through a plan's address maps: does each owner serve what the plan says?"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from oper.audit.finding import Finding
from oper.audit.log_part import LogPart
from oper.audit.rank_address_maps import RankMaps
from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.logs import LogOptions, Prepared, RowReader, open_log
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.plan import Plan


def replay(folder: Path | str, rows_read: Iterable[tuple[int, Ints]]) -> list[Finding]:
    """Replay the rows that a log reads, as (table number, rows int64 [N]) in any order.

    The reads that each owner serves must equal the plan's figures exactly, where the log is the one
    that the plan's profile counted.
    """
    plan = Plan.load(folder)
    maps = RankMaps(plan, folder)
    served = np.zeros(plan.ranks, dtype=np.int64)
    replicated = 0
    for table, rows in rows_read:
        for chunk in maps.chunks(table, rows):
            held = chunk.copies >> SLOT_BITS == LOCAL
            single = held.sum(axis=0) == 1
            served += np.bincount(held[:, single].argmax(axis=0), minlength=plan.ranks)
            replicated += int(len(single) - single.sum())
    wrong = None
    if replicated != plan.replica_accesses or (served != plan.owner_accesses).any():
        worst = int(np.abs(served - plan.owner_accesses).argmax())
        wrong = (
            f"rank {worst} serves {served[worst]:,} reads of rows it alone holds, and the plan "
            f"says {plan.owner_accesses[worst]:,}; {replicated:,} reads are of replicated rows, "
            f"and the plan says {plan.replica_accesses:,}; is it the log that was profiled?"
        )
    part = str(LogPart(plan.log_part))
    read = f"the log ({part})" if part else "the log"
    return [Finding(f"a replay of {read} serves what the plan says, to the row", wrong)]


def rows_of_log(
    folder: Path | str, log: Sequence[Path], options: LogOptions
) -> Iterator[tuple[int, Ints]]:
    """The input of `replay` from the files of a log, by the plan's id rules.

    Reads the plan's features unless `options` names columns, and the part of the log that the plan
    says was profiled unless `options` names rows. OperError where that has not as many samples as
    were profiled.
    """
    plan = Plan.load(folder)
    part = LogPart(plan.log_part if options.rows is None else {})
    options = part.options(options)
    if not options.columns:
        features = [name for table in plan.tables for name in table.features or (table.name,)]
        options = replace(options, columns=tuple(features))
    reader = RowReader(open_log(log, options), Prepared.load(plan.tables, folder))
    samples = 0
    for batch in part.batches(reader.batches(ids_only=True)):
        samples += batch.samples
        for key, table in reader.tables_of.items():
            yield table, batch.features[key].values
    if samples != plan.samples:
        where = f" ({part})" if str(part) else "" if options.rows is None else " of --rows"
        unknown = "" if plan.log_part else "; if its profile is a sum, the parts are not known"
        raise OperError(
            f"{', '.join(map(str, log))}: has {samples:,} samples{where}, and the plan's profile "
            f"counted {plan.samples:,}: it is another log, or another part of it; give the log "
            f"that was profiled, or the part with --rows{unknown}"
        )
