"""FBGEMM's request files (`.pt`, `.pt.gz`): indices, offsets and lengths of one batch of T tables.

In Meta's dlrm_datasets: `lengths` [T, B] sizes of the bags, `offsets` [T·B + 1] their running sum,
`indices` all ids, table by table. The tables are called t0, t1, …
"""

import contextlib
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oper.base.arrays import Ints
from oper.base.errors import OperError, one_line
from oper.files.input_files import LOG, open_file
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.logs.batches.columns import Column, KnownSize, Selection
from oper.logs.formats.decompression import open_unpacked

_MOST_TABLES = 1 << 16


class RequestSource(KnownSize):
    """One request file, memory-mapped; a compressed one is unpacked to a temporary file first.

    It is open only while it is read, so only one of many files takes memory.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        _, offsets, tables = _load(path)
        self.samples = (len(offsets) - 1) // tables
        self.columns = tuple(Column(f"t{t}", bags=True) for t in range(tables))

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in order."""
        total = self.samples
        indices, all_offsets, _ = _load(self._path)
        tables = [(name, int(name[1:])) for name in selection.features]
        for first in range(0, total, selection.batch_rows):
            stop = min(first + selection.batch_rows, total)
            features = {}
            for name, table in tables:
                offsets = all_offsets[table * total + first : table * total + stop + 1]
                ids = indices[offsets[0] : offsets[-1]].astype(np.int64)
                features[name] = Jagged(ids, np.diff(offsets).astype(np.int32))
            yield Batch(stop - first, features, Location(self.name, first, "sample"))


def _load(path: Path) -> tuple[Any, Ints, int]:
    """Load indices, offsets int64 [T·B + 1], and T."""
    content = _unpickle(path)
    if not isinstance(content, tuple | list) or len(content) != 3:
        raise OperError(
            f"{path}: expected a tuple of indices, offsets and lengths, as in Meta's "
            f"dlrm_datasets, got {type(content).__name__}"
        )
    import torch

    types = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    for name, tensor in zip(("indices", "offsets", "lengths"), content, strict=True):
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype not in types
            or tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            or (name != "lengths" and tensor.dim() != 1)
        ):
            raise OperError(
                f"{path}: {name} is not a tensor of integers"
                + ("" if name == "lengths" else " in one dimension")
            )
        # With strides of 0, a few bytes make a tensor of any size.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise OperError(f"{path}: {name} has more elements than are stored; write it again")
    indices, offsets, lengths = (tensor.numpy() for tensor in content)
    if lengths.ndim != 2 or not 1 <= lengths.shape[0] <= _MOST_TABLES:
        raise OperError(
            f"{path}: expected lengths of shape [tables, batch], of 1 to {_MOST_TABLES:,} tables, "
            f"got {lengths.shape}"
        )
    offsets = offsets.astype(np.int64)
    sizes = lengths.astype(np.int64).reshape(-1)
    if len(offsets) != len(sizes) + 1 or not np.array_equal(np.diff(offsets), sizes):
        raise OperError(
            f"{path}: offsets [{len(offsets)}] are not the running sums of lengths "
            f"{list(lengths.shape)}; the file is damaged: write it again"
        )
    if offsets[0] != 0 or offsets[-1] != len(indices) or (len(sizes) and sizes.min() < 0):
        raise OperError(
            f"{path}: offsets run from {offsets[0]} to {offsets[-1]}, and there are "
            f"{len(indices):,} indices; the file is damaged: write it again"
        )
    return indices, offsets, lengths.shape[0]


def _unpickle(path: Path) -> Any:
    import torch

    try:
        with contextlib.ExitStack() as stack:
            plain = path
            with open_file(path, LOG) as file:
                compressed = file.read(2) == b"\x1f\x8b"
            if compressed:
                temporary = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".pt"))
                with open_unpacked(path) as packed:
                    shutil.copyfileobj(packed, temporary, 1 << 22)
                temporary.flush()
                plain = Path(temporary.name)
            with open_file(plain, LOG) as file:
                is_zip = file.read(2) == b"PK"
            if is_zip:
                _check_members(path, plain)
            with warnings.catch_warnings():
                # torch warns of old protocols of pickle, which it reads all the same.
                warnings.simplefilter("ignore")
                return torch.load(plain, map_location="cpu", weights_only=True, mmap=is_zip)
    except OperError:
        raise
    except Exception as error:  # A damaged pickle may raise anything.
        raise OperError(
            f"{path}: cannot be loaded ({one_line(error)}); it is damaged, truncated, or holds "
            "other objects than tensors: copy it again, or save it as a tuple of three tensors"
        ) from error


def _check_members(name: Path, path: Path) -> None:
    """Raise OperError if a byte of a file of torch.save has changed.

    torch itself does not compare its members with their CRC-32, nor does it compress them. Files of
    its old format, which are not zip files, have no checksums.
    """
    with zipfile.ZipFile(path) as archive:
        packed = [m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise OperError(
                f"{name}: its member {packed[0]!r} is compressed, which torch.save does not do; "
                "save it with torch.save"
            )
        if (damaged := archive.testzip()) is not None:
            raise OperError(
                f"{name}: its member {damaged!r} does not have the CRC-32 that was written; it is "
                "damaged: copy it again, or save it with checksums"
            )
