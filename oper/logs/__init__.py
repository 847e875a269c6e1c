"""Access logs: readers of all formats, and the rules that turn raw values into row ids.

In: files, or batches in memory. Out: `Batch`es of row ids. Imports: base, files, tables.
"""

from oper.logs.batches.batch import Batch, Jagged
from oper.logs.batches.log_options import LogKeywords, LogOptions
from oper.logs.log import Log, open_log
from oper.logs.row_reader import RowReader, read
from oper.logs.table_discovery import Prepared, prepare

__all__ = [
    "Batch",
    "Jagged",
    "Log",
    "LogKeywords",
    "LogOptions",
    "Prepared",
    "RowReader",
    "open_log",
    "prepare",
    "read",
]
