"""Ranks that load a chain of checkpoints if there is one, and then save one delta after the other
till they are killed. Step s gives every seventh row, from row s modulo 7 on, the value s."""

from pathlib import Path
from typing import Any

import torch

import oper
from tests.support.torchrec.save_till_killed import KEY, ROWS, sharded_model

_EVERY = 7


def rows_after(step: int) -> torch.Tensor:
    """The value of each row after a step, [rows]; 0 of those that no step has come to."""
    back = (step - torch.arange(ROWS)) % _EVERY
    return torch.clamp(step - back, min=0)


def save_on(
    rank: int, ranks: int, store: str, folder: Path, exchange: bool, first_save: Any
) -> None:
    """Save without end; tells `first_save` the step that was loaded, before the first delta.
    Without `exchange` the file system cannot exchange names."""
    with sharded_model(rank, ranks, store, exchange) as (unsharded, model):
        step = 0
        if any(path.name.isdigit() for path in folder.glob("*")):
            step = oper.load(model, folder, deltas=True).step or 0
            held = model.state_dict()
            (shard,) = held[KEY].local_shards()
            first = shard.metadata.shard_offsets[0]
            expected = rows_after(step)[first : first + len(shard.tensor), None]
            assert bool((shard.tensor == expected).all()), step
            assert bool((held["dense.weight"] == step).all()), step
        else:
            model.load_state_dict(unsharded.all_values(0))
            oper.save(model, folder / "0", step=0, deltas=True)
        first_save.send(step)
        while True:
            step += 1
            weight = model.state_dict()[KEY]
            (shard,) = weight.local_shards()
            first = shard.metadata.shard_offsets[0]
            shard.tensor[(step - first) % _EVERY :: _EVERY] = step
            model.module.dense.weight.data.fill_(step)
            oper.save_delta(model, folder / str(step), step=step)
