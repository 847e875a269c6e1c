"""Whether two checkpoints have the same, however they are cut and put together."""

from pathlib import Path
from typing import Any

import torch

from oper.checkpoint.chain import Chain
from oper.checkpoint.saved_rows import read_rows
from oper.checkpoint.shard_file import open_part
from oper.checkpoint.soundness import open_chain


def assert_same(one: Path, other: Path) -> None:
    """Equal names, shapes and dtypes, equal bits of all tensors, equal objects."""
    first, second = _content(open_chain(one)), _content(open_chain(other))
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    for name, value in first.items():
        again = second[name]
        if isinstance(value, torch.Tensor):
            assert value.dtype == again.dtype, name
            assert torch.equal(value, again), name
        else:
            assert value == again, name


def _content(chain: Chain) -> dict[str, Any]:
    found: dict[str, Any] = {"paths": chain.index.paths}
    for name, tensor in chain.index.tensors.items():
        if name in chain.table_of_tensor:
            found[name] = chain.read_rows(name, 0, tensor.shape[0])
        elif tensor.shape:
            found[name] = read_rows(chain.folder, tensor, 0, tensor.shape[0])
        else:
            (shard,) = tensor.shards
            with open_part(chain.folder, shard.extent) as part:
                found[name] = torch.load(part, weights_only=True)  # type: ignore[arg-type]
    for name, extent in chain.index.objects.items():
        with open_part(chain.folder, extent) as part:
            found[name] = torch.load(part, weights_only=True)  # type: ignore[arg-type]
    return found
