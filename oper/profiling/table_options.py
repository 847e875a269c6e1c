"""The tables of a log that is to be counted: given in one of many forms, or inferred from it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oper.base.defaults import DIM, DTYPE, OPTIMIZER
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.log import Log
from oper.logs.table_discovery import Prepared, prepare
from oper.plan.plan import MARKER as PLAN_MARKER
from oper.plan.plan import Plan
from oper.profiling.profile import MARKER, Profile
from oper.tables.table import IdRule, Table, tables_of, tables_of_list
from oper.tables.table_file import load_tables


@dataclass(frozen=True)
class TableOptions:
    """Description of the tables, under the names of the commands' options.

    tables: a list of `Table`s or of TorchRec's configs, a module with TorchRec embedding
    collections, a file of tables or the name of a published data set, a profile, a plan or the
    folder of either, whose tables, id rules and vocabularies are taken; None: one table for each
    column of ids.

    dim, dtype, optimizer, ids, min_count: for tables of a file or of columns that do not state
    them. ids is dense, vocab or hash:ROWS; min_count leaves rarer values out of vocabularies.
    """

    tables: Any = None
    dim: int = DIM
    dtype: str = DTYPE
    optimizer: str = OPTIMIZER
    ids: str | None = None
    min_count: int = 1

    def __post_init__(self) -> None:
        self._rule()

    def prepare(self, log: Log, advance: Callable[[int], None] = lambda samples: None) -> Prepared:
        """Return the tables with rows and vocabularies, which the log completes.

        `advance` is called with the number of samples read.
        """
        if isinstance(self.tables, Profile | Plan):
            return self.tables.prepared()
        if isinstance(self.tables, str | Path):
            if _is_profile(self.tables):
                return Profile.load(self.tables).prepared()
            if (Path(self.tables) / PLAN_MARKER).is_file():
                return Plan.load(self.tables).prepared()
        return prepare(
            log,
            self._stated(log),
            dim=self.dim,
            dtype=self.dtype,
            optimizer=self.optimizer,
            min_count=self.min_count,
            all_columns=self.tables is None,
            advance=advance,
        )

    def _stated(self, log: Log) -> tuple[Table, ...] | None:
        """Return the tables as far as the options give them; None to infer them from the log."""
        kind, rows = self._rule()
        if isinstance(self.tables, str | Path):
            tables = load_tables(
                self.tables,
                dim=self.dim,
                dtype=self.dtype,
                optimizer=self.optimizer,
                ids=kind or "dense",
            )
            return tuple(
                replace(t, ids=replace(t.ids, min_count=max(t.ids.min_count, self.min_count)))
                for t in tables
            )
        if hasattr(self.tables, "modules"):
            return tables_of(self.tables)
        if self.tables is not None:
            return tables_of_list(self.tables)
        if kind is None:
            return None
        if kind == "hash" and rows == 0:
            raise OperError(
                f"{option('--ids', 'hash')}: needs the tables' rows: "
                f"{option('--ids', 'hash:1000000')}, or {option('--tables')}"
            )
        rule = IdRule(kind, self.min_count)
        return tuple(
            Table(name, rows, self.dim, self.dtype, self.optimizer, ids=rule)
            for name in log.features
        )

    def _rule(self) -> tuple[Any, int]:
        """Return the kind of ids and the number of rows: `hash:1000000` is hash, 1000000."""
        if self.ids is None:
            return None, 0
        kind, colon, rows = self.ids.partition(":")
        if kind not in ("dense", "hash", "vocab") or (
            colon and (kind != "hash" or not re.fullmatch("0*[1-9][0-9]{0,17}", rows))
        ):
            raise OperError(f"{option('--ids', self.ids)}: expected dense, hash:ROWS or vocab")
        return kind, int(rows or 0)


def _is_profile(spec: Path | str) -> bool:
    """Return True if a path is that of a profile, or of one of its windows."""
    return (Path(str(spec).partition("@")[0]) / MARKER).is_file()
