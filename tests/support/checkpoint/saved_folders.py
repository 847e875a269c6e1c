"""Checkpoints as torch.distributed.checkpoint writes them, of shards that a test chooses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

WEIGHT = "model.bags.embedding_bags.t.weight"
STATE = f"optimizer.state.{WEIGHT.removeprefix('model.')}.t.momentum1"


@dataclass(frozen=True)
class Part:
    """A shard of a tensor: rows and columns, each [first, end)."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its values."""
        found = tensor[slice(*self.rows)]
        return (found if self.columns is None else found[:, slice(*self.columns)]).clone()


def write(
    folder: Path, tensors: dict[str, tuple[torch.Tensor, list[Part]]], objects: dict[str, Any]
) -> None:
    """A checkpoint of tensors in shards, each in a file of its own, and of objects."""
    folder.mkdir(parents=True)
    described: dict[str, Any] = {}
    results: list[WriteResult] = []

    def add(key: MetadataIndex, value: Any) -> None:
        name = f"__{len(results)}_0.distcp"
        torch.save(value, folder / name)
        length = (folder / name).stat().st_size
        results.append(WriteResult(key, length, _StorageInfo(name, 0, length)))

    for name, (tensor, parts) in tensors.items():
        chunks = []
        for part in parts:
            values = part.of(tensor)
            offsets = [part.rows[0], *([] if part.columns is None else [part.columns[0]])]
            offsets += [0] * (tensor.dim() - len(offsets))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.size()))
            add(MetadataIndex(name, torch.Size(offsets)), values)
        described[name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), tensor.size(), chunks
        )
    for name, value in objects.items():
        described[name] = BytesStorageMetadata()
        add(MetadataIndex(name), value)
    FileSystemWriter(folder).finish(Metadata(described), [results])
