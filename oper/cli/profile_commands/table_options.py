"""Options for the tables of a log: named by an option, or inferred from the log."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from oper.base.errors import OperError
from oper.cli.shared.command import TABLES_GROUP

if TYPE_CHECKING:
    from oper.logs import Log, Prepared


Dtype = Literal["fp32", "fp16", "bf16", "int8"]
Optimizer = Literal[
    "none", "sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"
]

TABLES = typer.Option(
    None,
    "--tables",
    help="A YAML or JSON file, a published data set (criteo-kaggle), or a profile whose tables "
    "and id rules to use. [default: inferred from the log]",
    metavar="FILE|NAME",
    rich_help_panel=TABLES_GROUP,
)
DIM = typer.Option(
    64,
    "--dim",
    min=1,
    help="Values per row, for tables without it.",
    metavar="N",
    rich_help_panel=TABLES_GROUP,
)
DTYPE = typer.Option(
    "fp32",
    "--dtype",
    help="Type of values, for tables without it.",
    metavar="fp32|fp16|bf16|int8",
    rich_help_panel=TABLES_GROUP,
)
OPTIMIZER = typer.Option(
    "rowwise_adagrad",
    "--optimizer",
    help="Optimizer, whose state takes memory, for tables without it: none, sgd, "
    "momentum_sgd, adagrad, rowwise_adagrad, adam or partial_rowwise_adam.",
    metavar="NAME",
    rich_help_panel=TABLES_GROUP,
)
IDS = typer.Option(
    None,
    "--ids",
    help="How values become rows, for tables without it.",
    metavar="dense|hash:ROWS|vocab",
    rich_help_panel=TABLES_GROUP,
)
MIN_COUNT = typer.Option(
    1,
    "--min-count",
    min=1,
    help="Leave rarer values out of vocabularies.",
    metavar="N",
    rich_help_panel=TABLES_GROUP,
)


@dataclass(frozen=True)
class TableOptions:
    """The options' values, under the options' names."""

    tables: str | None
    dim: int
    dtype: str
    optimizer: str
    ids: str | None
    min_count: int

    def __post_init__(self) -> None:
        self._rule()

    def prepare(
        self, log: "Log", advance: Callable[[int], None] = lambda samples: None
    ) -> "Prepared":
        """The tables with rows and vocabularies, which the log completes."""
        from oper.logs import prepare
        from oper.profiling.profile import MARKER, Profile

        if self.tables is not None and (Path(self.tables.partition("@")[0]) / MARKER).is_file():
            return Profile.load(self.tables).prepared()
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

    def left_out(self, log: "Log") -> dict[str, str]:
        """Why each column of the log is in no table, where neither tables nor columns are named."""
        return log.left_out if self.tables is None else {}

    def _stated(self, log: "Log") -> Any:
        """The tables as far as the options give them; None to infer them from the log."""
        from oper.tables.table import IdRule, Table
        from oper.tables.table_file import load_tables

        kind, rows = self._rule()
        settings: dict[str, Any] = {
            "dim": self.dim,
            "dtype": self.dtype,
            "optimizer": self.optimizer,
        }
        if self.tables is not None:
            tables = load_tables(self.tables, ids=kind or "dense", **settings)
            return tuple(
                replace(t, ids=replace(t.ids, min_count=max(t.ids.min_count, self.min_count)))
                for t in tables
            )
        if kind is None:
            return None
        if kind == "hash" and rows == 0:
            raise OperError("--ids hash: needs the tables' rows: --ids hash:1000000, or --tables")
        rule = IdRule(kind, self.min_count)
        return tuple(Table(name, rows, **settings, ids=rule) for name in log.features)

    def _rule(self) -> tuple[Any, int]:
        """`hash:1000000` -> hash, 1000000."""
        if self.ids is None:
            return None, 0
        kind, colon, rows = self.ids.partition(":")
        if kind not in ("dense", "hash", "vocab") or (
            colon and (kind != "hash" or not re.fullmatch("0*[1-9][0-9]{0,17}", rows))
        ):
            raise OperError(f"--ids {self.ids!r}: dense, hash:ROWS or vocab was needed")
        return kind, int(rows or 0)
