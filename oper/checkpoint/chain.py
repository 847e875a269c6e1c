"""A checkpoint as a whole: a base, and the deltas upon it up to one of them.

A delta names the checkpoint that it continues by the digest of that checkpoint's marker, which
depends on all its files and on the links before it. So a chain either has every saved byte or fails
verification. The folders are siblings. A table's row comes from the last link that has it, which is
the base if no delta does; everything outside the tables comes from the last link.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from oper.base.errors import OperError
from oper.checkpoint.delta_rows import TOUCHED, UPON, DeltaRows, ids_of
from oper.checkpoint.link import Description, read_link
from oper.checkpoint.marker import FORMAT, Marker, is_there, paths_of_checkpoints
from oper.checkpoint.saved_index import SavedIndex, SavedTensor
from oper.checkpoint.saved_rows import read_rows
from oper.checkpoint.saved_tables import table_of_tensors

_OLDER = "an older checkpoint, which is whole"


@dataclass(frozen=True)
class Chain:
    """Base and deltas in order, each upon the link before; a whole checkpoint is the only link."""

    links: tuple[Description, ...]

    @property
    def last(self) -> Description:
        """The checkpoint itself."""
        return self.links[-1]

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint itself."""
        return self.last.folder

    @property
    def marker(self) -> Marker | None:
        """Marker of the checkpoint itself."""
        return self.last.marker

    @cached_property
    def table_of_tensor(self) -> dict[str, str]:
        """Table of each weight or state that has a table's rows, by the tensor's name."""
        if (delta := self.last.delta) is not None:
            return {name: t for t, table in delta.tables.items() for name in table["tensors"]}
        return table_of_tensors(self.last.index)

    @cached_property
    def index(self) -> SavedIndex:
        """Index of the whole, with the names of a whole save. Tensors with rows of tables have
        their places in the base, all others in the last link."""
        last = self.last.index
        if len(self.links) == 1:
            return last
        of_tables = {name: self._whole(name) for name in self.table_of_tensor}
        numbers = {name for name in last.tensors if name.startswith(f"{TOUCHED}.")}
        rest = {n: t for n, t in last.tensors.items() if n not in of_tables and n not in numbers}
        tensors = {**of_tables, **rest}
        paths: dict[str, tuple[str | int, ...]] = {}
        for link in self.links:
            paths |= link.index.paths
        objects = {name: extent for name, extent in last.objects.items() if name != UPON}
        named = {*tensors, *objects}
        paths = {name: path for name, path in paths.items() if name in named}
        return SavedIndex(tensors, objects, paths)

    def read_rows(self, name: str, first: int, rows: int) -> torch.Tensor:
        """Read rows [first, first + rows) of a tensor of a table, [rows, …].

        Raise OperError if a file is missing, truncated or damaged.
        """
        base, tensor = self.links[0], self.index.tensors[name]
        if len(self.links) == 1 or name not in self.table_of_tensor:
            return read_rows(self.folder, tensor, first, rows)
        saved = base.index.tensors.get(name)
        old = 0 if saved is None else max(min(rows, saved.shape[0] - first), 0)
        if saved is not None and old == rows:
            values = read_rows(base.folder, saved, first, rows)
        else:
            values = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)
            if saved is not None and old:
                values[:old] = read_rows(base.folder, saved, first, old)
        lacking = torch.ones(rows - old, dtype=torch.bool)
        for delta, touched in zip(self.links[1:], self._touched(name), strict=True):
            if touched is not None:
                at = touched.put(delta.index.tensors[name], first, values)
                lacking[at[at >= old] - old] = False
        if lacking.any():
            raise OperError(
                f"{self.folder}: {name!r}: neither it nor what it is upon has row "
                f"{first + old + int(lacking.nonzero()[0]):,}; the delta was changed: go on from "
                f"{_OLDER}"
            )
        return values

    def _touched(self, name: str) -> list[DeltaRows | None]:
        """Return each delta's rows of a tensor's table; None if it has none."""
        table = self.table_of_tensor[name]
        return [
            of.get(table) if name in link.index.tensors else None
            for link, of in zip(self.links[1:], self.rows_of_deltas, strict=True)
        ]

    @cached_property
    def rows_of_deltas(self) -> list[dict[str, DeltaRows]]:
        """Touched rows of each delta, by table."""
        by_delta = []
        for link in self.links[1:]:
            delta = link.delta
            assert delta is not None, "the links of a chain but the first are deltas"
            ids = {table: ids_of(link.index, table) for table in delta.tables}
            by_delta.append(
                {
                    table: DeltaRows(link.folder, tensor, delta.tables[table]["rows"])
                    for table, tensor in ids.items()
                    if tensor is not None
                }
            )
        return by_delta

    def _whole(self, name: str) -> SavedTensor:
        """Return a tensor of a table with all its rows."""
        delta = self.last.delta
        assert delta is not None
        rows = delta.tables[self.table_of_tensor[name]]["rows"]
        for link in self.links:
            if (tensor := link.index.tensors.get(name)) is not None:
                shards = tensor.shards if link is self.links[0] else ()
                return replace(tensor, shape=(rows, *tensor.shape[1:]), shards=shards)
        raise OperError(
            f"{self.folder}: neither it nor what it is upon has {name!r}, which its marker names; "
            f"go on from {_OLDER}"
        )


def read_chain(checkpoint: Path | str) -> Chain:
    """Read a checkpoint, or the newest of a folder of some, with all the links before it.

    Raise OperError if there is none, an index or marker is damaged, or a link is missing or
    replaced. `open_chain` checks the rest; only `verify` skips it, to list all problems.
    """
    links = [read_link(checkpoint)]
    while (delta := links[-1].delta) is not None:
        upper = links[-1].folder
        # A symbolic link lies elsewhere than its target.
        folder = upper.resolve().parent / delta.upon
        if not is_there(folder / FORMAT.marker):
            raise OperError(
                f"{upper}: is a delta upon {delta.upon}, and {folder} holds no checkpoint; put it "
                f"back there, or take {_OLDER}"
            )
        link = read_link(folder)
        sha256 = "" if link.marker is None else link.marker.digest
        if sha256 != delta.sha256:
            raise OperError(
                f"{upper}: is a delta upon the {delta.upon} of SHA-256 {delta.sha256[:12]}…, and "
                f"{folder} is another checkpoint now, of {sha256[:12]}…; put the first one "
                f"back, or take {_OLDER}"
            )
        links.append(link)
    return Chain(tuple(reversed(links)))


def check_replaceable(folder: Path | str) -> None:
    """Raise OperError if a folder is a checkpoint that sibling deltas continue: without it they
    cannot be loaded."""
    folder = Path(folder).resolve()
    if (replaced := _readable_marker(folder)) is None:
        return
    upon = []
    for path in paths_of_checkpoints(folder.parent):
        marker = _readable_marker(path)
        if (
            marker is not None
            and marker.delta is not None
            and marker.delta.sha256 == replaced.digest
        ):
            upon.append(path.name)
    if upon:
        more = f" and {len(upon) - 1} more" if len(upon) > 1 else ""
        raise OperError(
            f"{folder}: {upon[0]}{more} is a delta upon it, which could not be loaded any more; "
            "save to another folder, or remove the deltas first"
        )


def _readable_marker(folder: Path) -> Marker | None:
    """Return a folder's marker; None if it has no readable one, so that no delta can continue
    it."""
    try:
        return Marker.read(folder)
    except OperError:
        return None
