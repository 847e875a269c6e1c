"""Findings on a batch of the script's: its ids must be rows of the tables, numbered as in the
profile.

In: the plan, the model's tables, samples as the script gives them to the model. Out: findings. The
ids are read unchanged, because the plan's rules for a log's raw values need not be those of the
script.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.analysis.row_facts import check_profile
from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.formatting import format_share, plural
from oper.base.spoken import option
from oper.diagnosis.diagnosis import Finding
from oper.diagnosis.id_numbering import (
    Numbering,
    Verdict,
    hot_rows_of_plan,
    hot_rows_of_profile,
    judge,
)
from oper.logs import LogOptions, Prepared, RowReader, open_log
from oper.logs.batches.columns import NoSuchColumnError
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.torchrec.module_tables import first_names

_ENOUGH_SAMPLES = 1 << 16  # of a loader or a log, which may have many more
_ABOUT = "ids"
_RENUMBER = (
    "number the ids as in the log that was profiled, or profile what the script gives the model "
    "(oper.profile(batches, model)) and plan again; if they are the same numbers, other rows have "
    "become hot: see oper drift"
)


def batch_findings(
    plan: Plan,
    tables: Sequence[Table],
    batch: Any,
    reading: Mapping[str, Any],
    profile: Profile | None,
) -> list[Finding]:
    """Return the findings on the ids of `tables`, the model's tables in the plan, from the samples
    of `batch`.

    `batch` is a file in any format of logs, which is read by the keywords `reading`, or one
    KeyedJaggedTensor, or an iterable of batches that hold some. Raise OperError if it cannot be
    read, lacks a feature of a table, or the profile is not the plan's.
    """
    if profile is not None:
        check_profile(plan, profile)
    ids, of_samples, skipped = _read(plan, tables, batch, reading)
    findings = [
        Finding(
            "problem",
            _ABOUT,
            f"table {name!r}: {number:,} of its ids in the batch are none of its rows",
            "give the row ids that the script gives the model, from 0 to the table's rows less one",
        )
        for name, number in skipped.items()
    ]
    judged = [
        judge(table.name, _hot_rows(plan, table, ids[t], of_samples[t], profile), ids[t], of)
        for t, (table, of) in enumerate(zip(tables, of_samples, strict=True))
        if len(ids[t])
    ]
    return [*findings, *_others(judged), *_alike(judged), *_unknown(judged, profile)]


def _read(
    plan: Plan, tables: Sequence[Table], batch: Any, reading: Mapping[str, Any]
) -> tuple[list[Ints], list[Ints], dict[str, int]]:
    """Return the ids of each table in the first samples, their number per sample, and the number of
    ids that are not rows, by table."""
    rules = [plan.tables[plan.table_index(table.name)].ids for table in tables]
    plain = tuple(
        replace(table, ids=replace(rule, kind="dense", min_count=1))
        for table, rule in zip(tables, rules, strict=True)
    )
    options = replace(LogOptions.of(reading), on_bad_id="skip")
    if not options.columns and not options.values:
        names = [name for table in plain for name in table.columns]
        options = replace(options, columns=tuple(dict.fromkeys(names)))
    try:
        reader = RowReader(open_log(_as_log(batch), options), Prepared(plain))
    except NoSuchColumnError as error:
        if options.columns == LogOptions.of(reading).columns:
            raise
        where = batch if isinstance(batch, str | Path) else "the batch"
        raise OperError(
            f"{where}: has no column {error.wanted!r}, by which the model reads a table; "
            f"{error.known}; give samples with all features of the model"
        ) from error
    ids: list[list[Ints]] = [[] for _ in tables]
    of_samples: list[list[Ints]] = [[] for _ in tables]
    samples = 0
    for part in reader.batches(ids_only=True):
        lengths = np.zeros((len(tables), part.samples), dtype=np.int64)
        for key, table in reader.tables_of.items():
            feature = part.features[key]
            ids[table].append(feature.values)
            lengths[table] += np.diff(feature.offsets())
        for table, of_table in enumerate(lengths):
            of_samples[table].append(of_table)
        samples += part.samples
        if samples >= _ENOUGH_SAMPLES:
            break
    joined = [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in ids]
    return joined, [np.concatenate(parts) for parts in of_samples], reader.skipped


def _as_log(batch: Any) -> Any:
    if isinstance(batch, str | Path):
        return [Path(batch)]
    is_one = hasattr(batch, "keys") and hasattr(batch, "stride")
    return [batch] if is_one or not isinstance(batch, Iterable) else batch


def _hot_rows(
    plan: Plan, table: Table, ids: Ints, of_samples: Ints, profile: Profile | None
) -> Any:
    number = plan.table_index(table.name)
    if profile is not None:
        return hot_rows_of_profile(profile, number)
    return hot_rows_of_plan(plan, number, len(ids) / len(of_samples))


def _others(judged: Sequence[Numbering]) -> Iterable[Finding]:
    for numbering in judged:
        if numbering.verdict != Verdict.OTHER:
            continue
        text = (
            f"the ids of table {numbering.table!r} are numbered unlike the profile's: "
            f"{_told(numbering)}"
        )
        yield Finding("problem", _ABOUT, text, _RENUMBER)


def _told(numbering: Numbering) -> str:
    hot = numbering.hot
    assert hot is not None
    rows = "hottest row" if hot.rows == 1 else f"{hot.rows:,} hottest rows"
    return (
        f"its {rows} took {format_share(hot.share, 1)} of the accesses there, and "
        f"{format_share(numbering.share, 1)} here"
    )


def _alike(judged: Sequence[Numbering]) -> Iterable[Finding]:
    alike = [numbering for numbering in judged if numbering.verdict == Verdict.ALIKE]
    if alike:
        least = min(
            alike,
            key=lambda numbering: numbering.share / numbering.hot.share if numbering.hot else 1.0,
        )
        text = (
            f"numbered as in the profile, in {plural(len(alike), 'table')} of {len(judged):,}; of "
            f"the least alike, {least.table!r}, {_told(least).removeprefix('its ')}"
        )
        yield Finding("ok", _ABOUT, text)


def _unknown(judged: Sequence[Numbering], profile: Profile | None) -> Iterable[Finding]:
    names = [numbering.table for numbering in judged if numbering.verdict == Verdict.UNKNOWN]
    if names:
        text = (
            f"whether they are numbered as in the profile cannot be told of "
            f"{plural(len(names), 'table')} ({first_names(names)}): a few rows have most "
            "accesses, all have about as many, or the batch has too few samples"
        )
        more = f"give the plan's profile too ({option('--profile')}), which counts all rows"
        yield Finding("note", _ABOUT, text, None if profile is not None else more)
