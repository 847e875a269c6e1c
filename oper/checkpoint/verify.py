"""`oper checkpoint verify`: comparison of a checkpoint's files with those that were written.

With a marker, which `oper.save` writes, every byte is compared: sizes and SHA-256. Without one, as
in checkpoints that torch.distributed.checkpoint wrote alone, the sizes are unknown; then every
part must lie inside its file, and the CRC-32 of every tensor and object must match. For a delta all
links before it are read as well.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.checkpoint.chain import Chain, read_chain
from oper.checkpoint.link import Description
from oper.checkpoint.marker import is_there
from oper.checkpoint.shard_file import FILE, check_records
from oper.checkpoint.soundness import problems_of
from oper.files.input_files import open_file

_BLOCK_BYTES = 1 << 22
Advance = Callable[[float], None]

_BY_DIGESTS = "sizes and SHA-256 of all files"
_BY_RECORDS = "every part inside its file, and its CRC-32"


@dataclass(frozen=True)
class Verified:
    """Checked parts of a checkpoint, and its faults, one line each."""

    folder: Path
    checked: str
    bytes: int
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the checkpoint has no fault."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "checkpoint": str(self.folder),
            "ok": self.ok,
            "checked": self.checked,
            "bytes": self.bytes,
            "problems": self.problems,
        }


def bytes_to_verify(chain: Chain) -> int:
    """Return the number of bytes that `verify` reads."""
    return sum(map(_bytes_of, chain.links))


def _bytes_of(checkpoint: Description) -> int:
    if checkpoint.marker is not None:
        return sum(file["bytes"] for file in checkpoint.marker.files.values())
    return sum(extent.bytes for _, extent in checkpoint.index.extents())


def verify(checkpoint: Chain | Path | str, advance: Advance = lambda amount: None) -> Verified:
    """Read a checkpoint, or the newest of a folder of checkpoints, to its end and list its faults.

    Call `advance` with the number of bytes read. Raise OperError if there is no checkpoint, if an
    index or a marker is damaged, or if a link of the chain is missing or another checkpoint.
    """
    chain = checkpoint if isinstance(checkpoint, Chain) else read_chain(checkpoint)
    problems = list(problems_of(chain))
    for link in chain.links:
        problems += _problems_of_bytes(link, advance)
    checked = _BY_RECORDS if chain.marker is None else _BY_DIGESTS
    # A missing file lacks all its parts, but is named once.
    return Verified(chain.folder, checked, bytes_to_verify(chain), list(dict.fromkeys(problems)))


def _problems_of_bytes(link: Description, advance: Advance) -> Iterator[str]:
    """Yield each file, or part of a file, whose bytes have changed."""
    if link.marker is not None:
        for name, described in link.marker.files.items():
            if problem := _unlike(link.folder / name, described, advance):
                yield problem
        return
    for _, extent in link.index.extents():
        try:
            check_records(link.folder, extent)
        except OperError as error:
            yield str(error)
        advance(extent.bytes)


def _unlike(file: Path, described: dict[str, Any], advance: Advance) -> str | None:
    """Return why the bytes of a file, whose size was checked, differ from those that were
    written."""
    if not is_there(file) or file.stat().st_size != described["bytes"]:
        return None
    digest = hashlib.sha256()
    with open_file(file, FILE) as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != described["sha256"]:
        return f"{file}: its SHA-256 is not the one that was written: bytes of it have changed"
    return None
