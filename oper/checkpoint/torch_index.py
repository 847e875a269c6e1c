"""Index of a checkpoint in the format of torch.distributed.checkpoint, which writes or reads it."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from oper.checkpoint.saved_index import Extent, SavedIndex


def torch_metadata(index: SavedIndex) -> Metadata:
    """Return torch's own objects for an index."""
    described: dict[str, STORAGE_TYPES] = {}
    for name, tensor in index.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            for shard in tensor.shards
        ]
        described[name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks
        )
    described |= {name: BytesStorageMetadata() for name in index.objects}
    places = {result.index: result.storage_data for result in _places(index)}
    return Metadata(described, index.paths or None, places)


def write_torch_index(folder: Path, index: SavedIndex) -> None:
    """Write `.metadata` into a folder that has the files of the index."""
    metadata = torch_metadata(index)
    FileSystemWriter(folder).finish(metadata, [_places(index)])


def _places(index: SavedIndex) -> list[WriteResult]:
    shards = [
        _place(MetadataIndex(tensor.name, shard.offsets), shard.extent)
        for tensor in index.tensors.values()
        for shard in tensor.shards
    ]
    return shards + [_place(MetadataIndex(name), place) for name, place in index.objects.items()]


def _place(key: MetadataIndex, extent: Extent) -> WriteResult:
    info = _StorageInfo(extent.file, extent.start, extent.bytes)
    return WriteResult(key, extent.bytes, info)
