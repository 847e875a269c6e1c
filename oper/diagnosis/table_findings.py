"""Comparison of the tables of a plan and of a model by the rules of oper.torchrec, with all
findings.

In: `Plan`, the unsharded model. Out: findings, and the parts of the plan that the model's
collections would get.
"""

import logging
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from torch import nn

from oper.base.errors import OperError
from oper.diagnosis.diagnosis import Finding, Level
from oper.plan.plan import Plan
from oper.runtime.tables.optimizer_buckets import EmbeddingTable
from oper.tables.table import Table, tables_of_collection
from oper.torchrec import module_tables
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.other_modules import Kind, other_modules
from oper.torchrec.sharding_plan import planned_module

_PLAN_AGAIN = "plan again, for a profile of this model's tables (oper.profile(batches, model))"


class Matched(NamedTuple):
    """Collection that a sharder would take, and its part of the plan."""

    path: str
    collection: Any
    plan: Plan
    tables: list[EmbeddingTable]


class _Heard(ModelWarnings):
    """Recorder of a model's warnings, which are not logged."""

    def __init__(self) -> None:
        super().__init__(speaks=False)
        self.texts: dict[Hashable, str] = {}

    def warn(self, log: logging.Logger, about: Hashable, text: str) -> None:
        self.texts.setdefault(about, text)


def table_findings(plan: Plan, model: nn.Module) -> tuple[list[Finding], list[Matched]]:
    """Return all findings on the tables, and the collections whose tables match the plan."""
    findings: list[Finding] = []
    matched: list[Matched] = []
    planned = {table.name for table in plan.tables}
    taken = list(module_tables.collections(model))
    findings += _not_taken(model, planned)
    in_plan = []
    for path, collection in taken:
        names = [config.name for config in module_tables.configs(collection)]
        if planned.isdisjoint(names):
            continue  # `planned_module` reports it, below.
        in_plan.append((path, collection))
        findings_of = list(_of_collection(plan, model, path, collection))
        findings += findings_of
        if any(finding.level == "problem" for finding in findings_of):
            continue
        heard = _Heard()
        try:
            part, tables = module_tables.match_tables(plan, collection, None, heard)
        except OperError as error:
            findings.append(Finding.of_error("optimizers", error))
            continue
        findings += [Finding("note", "optimizers", text) for text in heard.texts.values()]
        matched.append(Matched(path, collection, part, tables))
    try:
        module_tables.paths_of_tables(in_plan)
    except OperError as error:
        findings.append(Finding.of_error("tables", error))
    findings += _as_sharded(plan, model, findings)
    if not any(finding.level == "problem" for finding in findings):
        number = sum(len(findings_of.tables) for findings_of in matched)
        text = f"all {number} of the model's tables are in the plan, as they are in the model"
        findings.insert(0, Finding("ok", "tables", text))
    return findings, matched


def _of_collection(plan: Plan, model: nn.Module, path: str, collection: Any) -> Iterator[Finding]:
    try:
        module_tables.check_place(model, path)
    except OperError as error:
        yield Finding.of_error("modules", error)
    try:
        tables = tables_of_collection(collection)
    except OperError as error:
        yield Finding.of_error("tables", error)
        return
    planned = {table.name for table in plan.tables}
    for config, table in zip(module_tables.configs(collection), tables, strict=True):
        if table.name not in planned:
            text = f"table {table.name!r}: the plan has no such table"
            yield Finding("problem", "tables", text, _PLAN_AGAIN)
            continue
        try:
            module_tables.check_table(plan, config, table)
        except OperError as error:
            yield Finding.of_error("tables", error)
        else:
            yield from _differences(plan.tables[plan.table_index(table.name)], table)


def _differences(planned: Table, mine: Table) -> Iterator[Finding]:
    """Yield notes on differences that leave the plan valid."""
    if set(mine.features) != set(planned.columns):
        yield Finding(
            "note",
            "features",
            f"table {mine.name!r}: the model reads it by {', '.join(mine.features)}, and the plan "
            f"counted {', '.join(planned.columns)}: its balance holds only if these have the same "
            "ids",
            "profile the features that the model reads",
        )
    if mine.pooling != planned.pooling:
        yield Finding(
            "note",
            "tables",
            f"table {mine.name!r}: the model pools by {mine.pooling}, and the tables that were "
            f"planned say {planned.pooling}; the model's is used, and the plan is the same",
        )


def _not_taken(model: nn.Module, planned: set[str]) -> Iterator[Finding]:
    """Yield findings on modules with rows that the sharders leave alone: whole on every rank, or
    for other sharders."""
    for other in other_modules(model):
        text = f"{other.named}: no sharder of OPER's takes it"
        as_it_is = other.kind != Kind.FUSED and planned.isdisjoint(other.tables)
        level: Level = "note" if as_it_is else "problem"
        yield Finding(level, "modules", text, other.to_do)


def _as_sharded(plan: Plan, model: nn.Module, known: list[Finding]) -> Iterator[Finding]:
    """Yield the errors and warnings of `oper.shard` itself, so that the doctor never passes a model
    that it would refuse."""
    heard = _Heard()
    try:
        planned_module(plan, model, heard)
    except OperError as error:
        if not any(finding.level == "problem" for finding in known):
            yield Finding.of_error("tables", error)
    names_in_model = {
        config.name
        for _, collection in module_tables.collections(model)
        for config in module_tables.configs(collection)
    }
    for text in heard.texts.values():
        yield Finding("note", "tables", text)
    if lacking := [table.name for table in plan.tables if table.name not in names_in_model]:
        text = f"of the plan, and not in the model: {module_tables.first_names(lacking, 8)}"
        yield Finding("note", "tables", text, "plan for this model alone, if it should have them")
