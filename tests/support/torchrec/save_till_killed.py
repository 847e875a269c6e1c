"""Ranks that load a checkpoint if there is one, and then save one after the other till they are
killed: all values of a checkpoint are the number of its step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import oper
from oper.files import atomic_renames
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.saved_cases import small_pieces

ROWS, DIM = 2000, 16
KEY = "bags.embedding_bags.t.weight"


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(ROWS, DIM, name="t", feature_names=["f"])
        self.bags = EmbeddingBagCollection([table])
        self.dense = nn.Linear(30, 30, bias=False)

    def all_values(self, step: int) -> dict[str, torch.Tensor]:
        """Its state dict with one value everywhere."""
        return {KEY: torch.full((ROWS, DIM), step), "dense.weight": torch.full((30, 30), step)}


@contextmanager
def sharded_model(rank: int, ranks: int, store: str, exchange: bool) -> Iterator[tuple[Model, Any]]:
    """A rank's model, unsharded and sharded; saves write small pieces, and without `exchange` the
    file system cannot exchange names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    unsharded = Model()
    model = oper.shard(unsharded, random_plan(0, tables_of(unsharded), ranks))
    with pytest.MonkeyPatch.context() as patch, small_pieces():
        if not exchange:
            patch.setattr(atomic_renames, "_renameat2", lambda *_: False)
        yield unsharded, model


def save_on(
    rank: int, ranks: int, store: str, folder: Path, exchange: bool, first_save: Any
) -> None:
    """Save without end; tells `first_save` the step that was loaded, before the first save. Without
    `exchange` the file system cannot exchange names."""
    with sharded_model(rank, ranks, store, exchange) as (unsharded, model):
        step = 0
        # Between two renames the checkpoint has another name, by which it is found.
        if folder.exists() or any(folder.parent.glob(".*.oper-old")):
            step = oper.load(model, folder).step or 0
            held = model.state_dict()
            (shard,) = held[KEY].local_shards()
            for values in (shard.tensor, held["dense.weight"]):
                assert bool((values == step).all()), step
        first_save.send(step)
        while True:
            step += 1
            model.load_state_dict(unsharded.all_values(step))
            oper.save(model, folder, step=step, overwrite=True)
