"""Work of the ranks in tests of optimizers' settings that differ between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import oper
from oper.base.errors import OperError
from tests.support.torchrec.models import Model, batch
from tests.support.torchrec.one_rank import plan_of
from tests.support.torchrec.ranks import LR, engines, sharded, train_step


def rows_of(collection: Any) -> list[torch.Tensor]:
    """This rank's rows and states, of a collection whose engine may have failed."""
    heap = collection.engine.heap
    parts = [part for w in range(len(heap.bases)) for part in (heap.rows(w), heap.state(w))]
    return [part.clone() for part in parts]


def unlike_rates(rank: int, group: dist.ProcessGroup, kind: str, **options: Any) -> None:
    """All ranks name the rate of each, before a row is changed; equal rates go on."""
    model, optimizer = sharded(group, kind, **options)
    for step in range(2):
        train_step(model, optimizer, batch(10 * step + rank))
    last = dist.get_world_size(group) - 1
    model.fused_optimizer.param_groups[0]["lr"] = 0.25 if rank == last else LR
    before = rows_of(model.module.bags)
    others = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    expected = rf"lr of 'wide' is {LR} on {others} and 0\.25 on rank {last}"
    with pytest.raises(OperError, match=expected) as error:
        train_step(model, optimizer, batch(rank))
    assert "expected the same on all ranks" in str(error.value)
    assert all(map(torch.equal, rows_of(model.module.bags), before))
    dist.barrier(group)


def changing_rates(rank: int, group: dist.ProcessGroup, **options: Any) -> None:
    """Rates that all ranks change alike in each step are fine."""
    model, optimizer = sharded(group, "adam", **options)
    for step in range(3):
        for settings in model.fused_optimizer.param_groups:
            settings["lr"] = LR / (1 + step)
        train_step(model, optimizer, batch(10 * step + rank))


def unlike_steps(rank: int, group: dist.ProcessGroup) -> None:
    """So is the number of Adam's steps named; that of SGD's changes nothing."""
    for kind, refused in (("sgd", False), ("adam", True)):
        model, optimizer = sharded(group, kind)
        for engine in engines(model):
            engine.optimizer_steps = 7 + rank
        if refused:
            expected = "steps that the optimizers counted before is 7 on rank 0 and 8 on rank 1"
            with pytest.raises(OperError, match=expected):
                train_step(model, optimizer, batch(rank))
        else:
            train_step(model, optimizer, batch(rank))
    dist.barrier(group)


def unlike_from_the_start(rank: int, group: dist.ProcessGroup) -> None:
    """Settings that differ when the model is sharded are named with their values."""
    ranks = dist.get_world_size(group)
    for setting, value in (("learning_rate", 0.5), ("eps", 0.125), ("weight_decay", 0.25)):
        model = Model("cpu")
        given: Any = {"optimizer": "exact_row_wise_adagrad", "weight_decay_mode": 2}
        given["weight_decay"] = 0.125
        if rank:
            given[setting] = value
        name = "lr" if setting == "learning_rate" else setting
        expected = f"{name} of '[a-z]*' is .* on rank 0 and {value} on rank 1"
        with pytest.raises(OperError, match=expected):
            oper.shard(model, plan_of(model, ranks), fused_params=given)
