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
    help="Tables and id rules: a YAML or JSON file, a published data set (criteo-kaggle), a "
    "profile or a plan. [default: inferred from the log]",
    metavar="FILE|NAME",
)
DIM = typer.Option(
    defaults.DIM,
    "--dim",
    min=1,
    help="Values per row, for tables without it.",
    metavar="N",
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
    help="Optimizer, whose state takes memory, for tables without one: none, sgd, "
    "momentum_sgd, adagrad, rowwise_adagrad, adam or partial_rowwise_adam.",
    metavar="NAME",
    rich_help_panel=TABLES_GROUP,
)
IDS = typer.Option(
    None,
    "--ids",
    help="Rule that turns values into rows, for tables without it.",
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
