"""One kind for each column of a log whose files store it in different types.

Pandas writes a column of integers as floating-point numbers if a value is missing, so one day's
file has int64 and the next day's double; a file without any value of a column has neither. A column
is of ids if it is of ids in some file and all other files have whole numbers in it: integers,
floating-point numbers or decimals of any width. A fraction makes the files differ; if it is beyond
the examined beginning of a file, it ends the reading.
"""

from collections.abc import Sequence
from dataclasses import replace

from oper.base.errors import OperError
from oper.logs.batches.columns import Column, Selection, Source

_PEEK_ROWS = 1000


def agree(sources: Sequence[Source]) -> None:
    """Set the columns of a log's files to one kind for each name, as far as their values allow."""
    if len(sources) < 2:
        return
    for name in {column.name for source in sources for column in source.columns}:
        same_name = [(s, c) for s in sources for c in s.columns if c.name == name]
        filled = [column for _, column in same_name if not column.blank]
        if not filled:
            continue
        chosen = next((column for column in filled if column.kind == "ids"), filled[0])
        others = [(s, c) for s, c in same_name if c.blank or c.kind != chosen.kind]
        if all(c.blank or (chosen.kind == "ids" and _may_be_whole(s, c)) for s, c in others):
            for source, column in others:
                _set(source, column, chosen)


def _may_be_whole(source: Source, column: Column) -> bool:
    """Return whether the beginning of a file has only whole numbers in a column of floats."""
    if not column.floats or column.other:
        return False
    if column.pointed:  # of a text file, whose beginning has been looked at
        return True
    selection = Selection((column.name,), (), None, None, _PEEK_ROWS)
    try:
        next(source.batches(selection), None)
    except OperError:
        return False
    return True


def _set(source: Source, column: Column, chosen: Column) -> None:
    """Set a column of a file to the kind that it has in another one."""
    as_chosen = replace(column, kind=chosen.kind, reason=chosen.reason, doubt=column.doubt)
    source.columns = tuple(as_chosen if c is column else c for c in source.columns)
