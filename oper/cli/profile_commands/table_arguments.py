"""Options for the tables of a log: named by an option, or inferred from the log."""

from typing import Literal

import typer

from oper.base import defaults
from oper.cli.shared.command import TABLES_GROUP

Dtype = Literal["fp32", "fp16", "bf16", "int8"]
Optimizer = Literal[
    "none", "sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"
]

TABLES = typer.Option(
    None,
    "--tables",
    help="A YAML or JSON file, a published data set (criteo-kaggle), or a profile or plan whose "
    "tables, id rules and vocabularies to use. [default: inferred from the log]",
    metavar="FILE|NAME",
    rich_help_panel=TABLES_GROUP,
)
DIM = typer.Option(
    defaults.DIM,
    "--dim",
    min=1,
    help="Values per row, for tables without it.",
    metavar="N",
    rich_help_panel=TABLES_GROUP,
)
DTYPE = typer.Option(
    defaults.DTYPE,
    "--dtype",
    help="Type of values, for tables without it.",
    metavar="fp32|fp16|bf16|int8",
    rich_help_panel=TABLES_GROUP,
)
OPTIMIZER = typer.Option(
    defaults.OPTIMIZER,
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
