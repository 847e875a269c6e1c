"""Save plans and write results of torch.distributed.checkpoint as JSON, for messages between ranks.

The JSON has the fields that torch's default planner and oper's writer set. `storage_data` of a plan
is not among them: it is set after the ranks have exchanged their plans.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """Return a rank's plan as JSON."""
    return {"items": [_item_to_json(item) for item in plan.items], "paths": plan.planner_data}


def plan_from_json(content: dict[str, Any]) -> SavePlan:
    """Return the plan from the `content` of `plan_to_json`."""
    items = [_item_from_json(item) for item in content["items"]]
    return SavePlan(items, planner_data={k: tuple(path) for k, path in content["paths"].items()})


def result_to_json(result: WriteResult) -> list[Any]:
    """Return as JSON the place to which a rank wrote an item."""
    place = result.storage_data
    index = _index_to_json(result.index)
    return [index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def result_from_json(content: list[Any]) -> WriteResult:
    """Return the result from the `content` of `result_to_json`."""
    index, size, *place = content
    return WriteResult(MetadataIndex(*index), size, _StorageInfo(*place))


def _index_to_json(index: MetadataIndex) -> list[Any]:
    return [index.fqn, index.offset, index.index]


def _item_to_json(item: WriteItem) -> dict[str, Any]:
    content: dict[str, Any] = {"index": _index_to_json(item.index), "type": item.type.name}
    if (data := item.bytes_io_data) is not None:
        content["bytes"] = data.nbytes
    if (tensor := item.tensor_data) is not None:
        content["sizes"] = [tensor.chunk.offsets, tensor.chunk.sizes, tensor.size]
        of = tensor.properties
        content["properties"] = {
            "dtype": str(of.dtype),
            "layout": str(of.layout),
            "requires_grad": of.requires_grad,
            "memory_format": str(of.memory_format),
            "pin_memory": of.pin_memory,
        }
    return content


def _item_from_json(content: dict[str, Any]) -> WriteItem:
    data = BytesIOWriteData(content["bytes"]) if "bytes" in content else None
    tensor = None
    if "sizes" in content:
        offsets, sizes, size = map(torch.Size, content["sizes"])
        # The name of a dtype, layout or memory format, such as "torch.float32", stands for it.
        properties = {
            name: getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
            for name, value in content["properties"].items()
        }
        chunk = ChunkStorageMetadata(offsets, sizes)
        tensor = TensorWriteData(chunk, TensorProperties(**properties), size)
    index = MetadataIndex(*content["index"])
    return WriteItem(index, WriteItemType[content["type"]], data, tensor)
