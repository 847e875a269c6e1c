"""Shards in the files of a checkpoint: each a tensor as `torch.save` writes it, one after another.

Such a shard is a zip archive whose record `data/0` has the values in their memory layout and a
CRC-32, which torch writes but never compares. So rows can be read from the middle of a shard of any
size, and a shard that is read whole is compared with its CRC-32.
"""

import io
import math
import os
import secrets
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from oper.base.errors import OperError, one_line
from oper.checkpoint.direct_file import DirectFile
from oper.checkpoint.saved_index import Extent, SavedTensor, Shard
from oper.files.input_files import Kind, open_file

SUFFIX = ".distcp"
# Most bytes of a shard that is read whole, so that its CRC-32 can be compared, before its rows are
# taken from it. `oper.save` writes shards of at most half as many.
MOST_WHOLE_BYTES = 1 << 26
FILE = Kind("a file of a checkpoint", None)  # its index names the bytes to read
_SAVE_BYTES = 16  # at the end of a file, not named by the index
_LOCAL_HEADER_BYTES = 30  # of a zip record, before its name
_NAME_LENGTH_AT = 26  # in that header; two bytes later is the length of the extra field


class ShardFile:
    """New file of shards."""

    def __init__(self, path: Path) -> None:
        self._file = DirectFile(path)

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._file.bytes

    def write(self, data: Any) -> int:
        """Append bytes: `torch.save` writes into this file."""
        return self._file.write(data)

    def flush(self) -> None:
        """Do nothing: `torch.save` calls this after each shard."""

    def add(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Append a shard, with only the tensor's part of its storage. Return its first byte and its
        number of bytes."""
        start = self.bytes
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        torch.save(tensor, cast(Any, self))
        return start, self.bytes - start

    def close(self, save: str) -> dict[str, Any]:
        """End the file with the bytes of its save, flush it to the disk and close it. Return its
        bytes and SHA-256 in the format of a marker."""
        self.write(bytes.fromhex(save))
        return {"sha256": self._file.close(), "bytes": self.bytes}

    def abandon(self) -> None:
        """Close the file, complete or not."""
        self._file.abandon()


def new_save() -> str:
    """Return random bytes, in hex, for the shard files of one save to end with."""
    return secrets.token_hex(_SAVE_BYTES)


def ends_with(file: Path, save: str) -> bool:
    """Return whether a shard file is of this save."""
    with open_file(file, FILE) as opened:
        opened.seek(max(os.fstat(opened.fileno()).st_size - _SAVE_BYTES, 0))
        return opened.read(_SAVE_BYTES).hex() == save


class _Record(NamedTuple):
    """Values of a shard: their first byte in the shard, their bytes and their CRC-32."""

    start: int
    bytes: int
    crc: int


class _Part(io.RawIOBase):
    """Part of a file as a file, which zipfile and torch read."""

    def __init__(self, file: Any, extent: Extent) -> None:
        self._file, self._start, self._bytes, self._at = file, extent.start, extent.bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._bytes}[whence]
        if start + offset < 0:
            raise OSError("a place before its begin")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._bytes - self._at), 0)
        self._file.seek(self._start + self._at)
        read: int = self._file.readinto(view[:count])
        self._at += read
        return read


def open_part(folder: Path, extent: Extent) -> io.RawIOBase:
    """Open a part of a file of a checkpoint as a file, to be closed.

    Raise OperError if the file is missing, or ends before the part.
    """
    file = open_file(folder / extent.file, FILE)
    size = os.fstat(file.fileno()).st_size
    if extent.start + extent.bytes > size:
        file.close()
        raise OperError(
            f"{folder / extent.file}: {size:,} bytes, and a part of the checkpoint ends at "
            f"{extent.start + extent.bytes:,}; it is truncated: copy or write the checkpoint again"
        )
    part = _Part(file, extent)
    part.close = file.close  # type: ignore[method-assign]
    return part


def read_shard_rows(
    folder: Path, tensor: SavedTensor, shard: Shard, first: int, rows: int
) -> torch.Tensor:
    """Read rows of a shard, [rows, …], `first` counted from the shard's first row.

    Raise OperError if the file is missing or truncated, the shard is not a tensor of this dtype and
    shape, or it was read whole and its CRC-32 differs.
    """
    row_bytes = tensor.dtype.itemsize * math.prod(shard.sizes[1:])
    what = f"{folder / shard.extent.file}: {tensor.name!r}, rows from {shard.offsets[:1]}"
    with open_part(folder, shard.extent) as part:
        try:
            record = _record(part)
            _check_layout(part, tensor.dtype, shard.sizes)
        except Exception as error:  # A damaged archive or pickle may raise anything.
            raise OperError(
                f"{what}: is not a readable tensor ({one_line(error)}); the file was changed or "
                "damaged: copy or write the checkpoint again"
            ) from error
        if record.bytes != row_bytes * (shard.sizes[0] if shard.sizes else 1):
            raise OperError(
                f"{what}: expected a tensor of {shard.sizes} in {tensor.dtype}, got "
                f"{record.bytes:,} bytes; the file was changed: write the checkpoint again"
            )
        whole = record.bytes <= MOST_WHOLE_BYTES
        start, count = (0, record.bytes) if whole else (row_bytes * first, row_bytes * rows)
        values = torch.empty(count, dtype=torch.uint8)
        part.seek(record.start + start)
        view = memoryview(cast(Any, values.numpy()))
        read = 0
        while read < count and (more := part.readinto(view[read:])):
            read += more
        if read < count or (whole and zlib.crc32(view) != record.crc):
            raise OperError(
                f"{what}: its CRC-32 is not the one that was written; the file was changed or "
                "damaged: copy or write the checkpoint again"
            )
    values_of_type = values.view(tensor.dtype)
    if not shard.sizes:
        return values_of_type.reshape(())
    if not whole:
        return values_of_type.view(rows, *shard.sizes[1:])
    return values_of_type.view(shard.sizes)[first : first + rows]


def check_records(folder: Path, extent: Extent) -> None:
    """Compare the content of an archive, a tensor or an object, with its CRC-32s. Raise OperError
    if one differs, or if it is not an archive."""
    end = extent.start + extent.bytes
    what = f"{folder / extent.file}, bytes {extent.start:,} to {end:,}"
    with open_part(folder, extent) as part:
        try:
            with zipfile.ZipFile(io.BufferedReader(part)) as archive:
                packed = [i for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
                bad = packed[0].filename if packed else archive.testzip()
        except Exception as error:  # A damaged archive may raise anything.
            raise OperError(f"{what}: is not what torch saves ({one_line(error)})") from error
        if bad is not None:
            raise OperError(
                f"{what}: {bad[:80]!r} has another CRC-32 than the one that was written"
            )


def _record(part: io.RawIOBase) -> _Record:
    """Return the place of the values of a shard."""
    with zipfile.ZipFile(cast(Any, part)) as archive:
        infos = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        if len(infos) != 1 or infos[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError("it has no values, or several, or packed ones")
    (info,) = infos
    part.seek(info.header_offset)
    header = part.read(_LOCAL_HEADER_BYTES) or b""
    lengths = header[_NAME_LENGTH_AT:_LOCAL_HEADER_BYTES]
    name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return _Record(
        info.header_offset + _LOCAL_HEADER_BYTES + name + extra, info.file_size, info.CRC
    )


def _check_layout(part: io.RawIOBase, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Raise ValueError unless the values are those of a tensor of this dtype and these sizes, in
    the order of its indices."""
    part.seek(0)
    # On the meta device only the tensor's description is read, not its values.
    described = torch.load(cast(Any, part), map_location="meta", weights_only=True)
    if not isinstance(described, torch.Tensor):
        raise ValueError(f"it holds a {type(described).__name__}")
    if (described.dtype, tuple(described.shape)) != (dtype, sizes):
        raise ValueError(f"it is {list(described.shape)} in {described.dtype}")
    if not described.is_contiguous() or described.storage_offset():
        raise ValueError("its values are not in the order of its indices")
