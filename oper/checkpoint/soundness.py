"""Checks that every reader of a checkpoint makes before it reads any values.

`oper.load` and `oper checkpoint inspect`, `reshard` and `export` open a checkpoint here and raise
for the first problem; `verify` lists all of them, and then reads every byte.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from oper.base.errors import OperError
from oper.checkpoint.chain import Chain, read_chain
from oper.checkpoint.delta_rows import TOUCHED, ids_of, is_of_delta
from oper.checkpoint.link import Description
from oper.checkpoint.marker import FORMAT, Marker, is_there
from oper.checkpoint.saved_index import INDEX, Extent
from oper.checkpoint.saved_tables import table_of_tensors
from oper.checkpoint.shard_file import SUFFIX, ends_with
from oper.files.manifest import describe_file

_AGAIN = "copy or write the checkpoint again"


def open_chain(checkpoint: Chain | Path | str) -> Chain:
    """Open a checkpoint, or the newest in a folder of checkpoints, with all the links before it.

    Raise OperError if there is none, or a link is missing, damaged, incomplete or replaced.
    """
    chain = checkpoint if isinstance(checkpoint, Chain) else read_chain(checkpoint)
    for problem in problems_of(chain):
        raise OperError(problem)
    return chain


def problems_of(chain: Chain) -> Iterator[str]:
    """Yield each problem that sizes, the indices, the markers and the rows' numbers show."""
    sound = True
    for link in chain.links:
        for problem in _problems_of_link(link):
            sound = False
            yield problem
    if sound:  # Otherwise the rows' numbers may be missing.
        yield from _problems_of_rows(chain)


def _problems_of_link(link: Description) -> Iterator[str]:
    for name, extent in link.index.extents():
        if problem := _outside(link.folder, name, extent):
            yield problem
    if link.marker is None:
        if is_of_delta(link.index):
            yield (
                f"{link.folder}: has the files of a delta, and its {FORMAT.marker} is missing, "
                "which names the checkpoint before it: copy the folder again, or load an older one"
            )
        return
    yield from _problems_of_files(link, link.marker)
    if link.delta is None and is_of_delta(link.index):
        yield _other_marker(link, "is of a whole checkpoint, and the files are of a delta")
    if link.delta is not None:
        yield from _problems_of_delta(link)


def _outside(folder: Path, name: str, extent: Extent) -> str | None:
    """Return why a part of the index is not in its file."""
    file = folder / extent.file
    if not is_there(file):
        return f"{file}: is missing; the folder is incomplete: {_AGAIN}"
    size, end = file.stat().st_size, extent.start + extent.bytes
    if end > size:
        return f"{file}: {size:,} bytes, and {name[:80]!r} ends at {end:,}: it is truncated"
    return None


def _problems_of_files(link: Description, marker: Marker) -> Iterator[str]:
    """Yield each difference between the files of a folder and its marker's list of them."""
    for name, described in marker.files.items():
        file = link.folder / name
        if not is_there(file):
            yield f"{file}: is missing; the folder is incomplete: {_AGAIN}"
        elif name == INDEX:
            if describe_file(file) != described:
                yield _other_marker(link, f"is not that of this {INDEX}, by its SHA-256")
        elif (size := file.stat().st_size) != described["bytes"]:
            yield (
                f"{file}: {size} bytes, and {described['bytes']} were written; it is truncated "
                f"or was changed: {_AGAIN}"
            )
        elif name.endswith(SUFFIX) and marker.save and not ends_with(file, marker.save):
            yield f"{file}: is of another save than the {FORMAT.marker} beside it; {_AGAIN}"
    if unlisted := {INDEX, *(extent.file for _, extent in link.index.extents())} - {*marker.files}:
        yield _other_marker(link, f"does not list {min(unlisted)[:80]!r}")


def _problems_of_delta(link: Description) -> Iterator[str]:
    """Yield each difference between the tensors of a delta and its marker's tables."""
    assert link.delta is not None
    tables, tensors = link.delta.tables, link.index.tensors
    for name in tensors:
        table = name.removeprefix(f"{TOUCHED}.")
        if table != name and table not in tables:
            yield _other_marker(link, f"lacks the table {table[:80]!r}")
    for table, described in tables.items():
        ids = ids_of(link.index, table)
        listed = {name for name in described["tensors"] if name in tensors}
        if ids is None:
            if listed:
                yield _other_marker(link, f"has rows of {min(listed)[:80]!r} without their numbers")
            continue
        if ids.dtype != torch.int64 or len(ids.shape) != 1:
            yield f"{link.folder}: {ids.name[:80]!r} has no numbers of rows; {_AGAIN}"
            continue
        if lacking := {*described["tensors"]} - listed:
            yield f"{link.folder}: has no {min(lacking)[:80]!r}, which its marker names; {_AGAIN}"
        for name in sorted(listed):
            if tensors[name].shape[:1] != ids.shape:
                yield (
                    f"{link.folder}: {name[:80]!r} has {tensors[name].shape} for {ids.shape[0]:,} "
                    f"touched rows; {_AGAIN}"
                )
    for name, table in table_of_tensors(link.index).items():
        ids = ids_of(link.index, table)
        if ids is None or table not in tables or name in tables[table]["tensors"]:
            continue
        rows = tensors[name].shape[:1]
        if rows == ids.shape != (tables[table]["rows"],):
            yield _other_marker(link, f"lacks {name[:80]!r} of table {table[:80]!r}")


def _problems_of_rows(chain: Chain) -> Iterator[str]:
    """Yield a problem for each table whose touched rows are out of range, or that lacks rows."""
    numbers: list[dict[str, torch.Tensor]] = []
    for of_tables in chain.rows_of_deltas:
        try:
            numbers.append({table: rows.numbers() for table, rows in of_tables.items()})
        except OperError as error:
            yield str(error)
            return
    if chain.last.delta is None:
        return
    try:
        index = chain.index
    except OperError as error:
        yield str(error)
        return
    for name, table in chain.table_of_tensor.items():
        saved = chain.links[0].index.tensors.get(name)
        old, rows = 0 if saved is None else saved.shape[0], index.tensors[name].shape[0]
        tails = {
            (link.index.tensors[name].shape[1:], link.index.tensors[name].dtype)
            for link in chain.links
            if name in link.index.tensors
        }
        if len(tails) > 1:
            yield f"{chain.folder}: links differ in the shape of {name[:80]!r}; {_AGAIN}"
            continue
        if old > rows:
            yield f"{chain.folder}: {name[:80]!r} has {rows:,} rows, and {old:,} before; {_AGAIN}"
            continue
        lacking = torch.ones(rows - old, dtype=torch.bool)
        for link, ids in zip(chain.links[1:], numbers, strict=True):
            if table in ids and name in link.index.tensors:
                new = ids[table][ids[table] >= old] - old
                lacking[new[new < len(lacking)]] = False
        if lacking.any():
            yield (
                f"{chain.folder}: {name[:80]!r}: neither it nor the links before it have row "
                f"{old + int(lacking.nonzero()[0]):,}; the delta was changed: load an older "
                "checkpoint, which is whole"
            )


def _other_marker(link: Description, why: str) -> str:
    return (
        f"{link.folder / FORMAT.marker}: {why}; it was changed, or is of another checkpoint: "
        f"{_AGAIN}"
    )
