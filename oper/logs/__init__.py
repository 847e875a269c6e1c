"""Access logs: readers of every form, and the rules that turn raw values into row ids."""

from oper.logs.batch import Batch, Jagged
from oper.logs.log import Log, open_log
from oper.logs.options import LogOptions
from oper.logs.prepare import Prepared, prepare
from oper.logs.read import RowReader, read

__all__ = [
    "Batch",
    "Jagged",
    "Log",
    "LogOptions",
    "Prepared",
    "RowReader",
    "open_log",
    "prepare",
    "read",
]
