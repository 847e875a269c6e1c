"""`oper checkpoint verify`: whether the files of a checkpoint are those that were written.

With a marker, which `oper.save` writes, every byte is compared: sizes and SHA-256. Without one, as
of checkpoints that torch.distributed.checkpoint wrote alone, there is nothing to compare sizes
with; that every part lies inside its file, and the CRC-32 of every tensor and object, are checked.
Of a delta everything that it is upon is read as well.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.checkpoint.chain import Chain, as_chain
from oper.checkpoint.describe import Description
from oper.checkpoint.saved_index import Extent
from oper.checkpoint.shard_file import FILE, check_records
from oper.files.input_files import open_file

_BLOCK_BYTES = 1 << 22
Advance = Callable[[float], None]

_BY_DIGESTS = "sizes and SHA-256 of all files"
_BY_RECORDS = "every part inside its file, and its CRC-32"


@dataclass(frozen=True)
class Verified:
    """What was checked of a checkpoint, and what is wrong, one line each."""

    folder: Path
    checked: str
    bytes: int
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "checkpoint": str(self.folder),
            "ok": self.ok,
            "checked": self.checked,
            "bytes": self.bytes,
            "problems": self.problems,
        }


def bytes_to_verify(chain: Chain) -> int:
    """The bytes that `verify` reads."""
    return sum(map(_bytes_of, chain.links))


def _bytes_of(checkpoint: Description) -> int:
    if checkpoint.marker is not None:
        return sum(file["bytes"] for file in checkpoint.marker.files.values())
    return sum(extent.bytes for _, extent in checkpoint.index.extents())


def verify(checkpoint: Chain | Path | str, advance: Advance = lambda amount: None) -> Verified:
    """Read a checkpoint, or the newest of a folder of some, to its end and say what is wrong.

    `advance` is told of bytes that were read. OperError where there is no checkpoint, its index or
    its marker is damaged, or what it is upon is missing or another one.
    """
    chain = as_chain(checkpoint)
    problems = [problem for link in chain.links for problem in _problems(link, advance)]
    checked = _BY_RECORDS if chain.marker is None else _BY_DIGESTS
    # A file that is missing lacks all its parts: it is named once.
    return Verified(chain.folder, checked, bytes_to_verify(chain), list(dict.fromkeys(problems)))


def _problems(checkpoint: Description, advance: Advance) -> list[str]:
    """What is wrong with the files of one folder."""
    problems: list[str] = []
    folder, marker = checkpoint.folder, checkpoint.marker
    for name, extent in checkpoint.index.extents():
        if problem := _outside(folder, name, extent):
            problems.append(problem)
    if marker is not None:
        for name, described in marker.files.items():
            if problem := _unlike(folder / name, described, advance):
                problems.append(problem)
    elif not problems:
        for _, extent in checkpoint.index.extents():
            try:
                check_records(folder, extent)
            except OperError as error:
                problems.append(str(error))
            advance(extent.bytes)
    return problems


def _outside(folder: Path, name: str, extent: Extent) -> str | None:
    """Why a part of the index is not in its file."""
    file = folder / extent.file
    if not file.is_file():
        return f"{file}: is missing"
    size, end = file.stat().st_size, extent.start + extent.bytes
    if end > size:
        return f"{file}: {size:,} bytes, and {name!r} ends at {end:,}: it is truncated"
    return None


def _unlike(file: Path, described: dict[str, Any], advance: Advance) -> str | None:
    """Why a file is not the one that was written."""
    if not file.is_file():
        return f"{file}: is missing"
    size = file.stat().st_size
    if size != described["bytes"]:
        return f"{file}: {size:,} bytes, and {described['bytes']:,} were written"
    digest = hashlib.sha256()
    with open_file(file, FILE) as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != described["sha256"]:
        return f"{file}: its SHA-256 is not the one that was written: bytes of it have changed"
    return None
