"""Work of the ranks in tests of tables that are frozen after the model is sharded."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings
from tests.support.torchrec.equal_settings_cases import rows_of
from tests.support.torchrec.models import TABLES, Model, Reference, batch
from tests.support.torchrec.ranks import (
    DENSE_LR,
    LR,
    compare,
    reference_state,
    sharded,
    train_step,
    whole_model,
)

# Tables of one bucket and of several, all of a collection, all of the model, and none again.
SCHEDULE: tuple[tuple[str, ...], ...] = (
    (),
    ("wide",),
    ("other", "seen"),
    ("wide", "mean", "tiny", "other"),
    TABLES,
    (),
    ("mean", "weighted", "sorts"),
)


def freeze(model: nn.Module, frozen: Collection[str]) -> None:
    """Have `requires_grad` of these tables False, and of all others True."""
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.requires_grad_(name.split(".")[-2] not in frozen)


def toggled(rank: int, group: dist.ProcessGroup, kind: str, **options: Any) -> None:
    """Tables that are frozen for some steps train as in the unsharded model, whose optimizers pass
    them over in these steps."""
    ranks = dist.get_world_size(group)
    model, optimizer = sharded(group, kind, **options)
    reference = Reference(Model("cpu"), kind, LR, DENSE_LR)
    for step, frozen in enumerate(SCHEDULE):
        batches = [batch(100 * step + r, order=step) for r in range(ranks)]
        freeze(model, frozen)
        before = whole_model(model, group)
        train_step(model, optimizer, batches[rank])
        reference.kind = {name: "none" if name in frozen else kind for name in TABLES}
        reference.step(batches)
        after = whole_model(model, group)
        for key, value in after.items():
            if key.split("/")[0].split(".")[-2] in frozen and not key.endswith(".iter"):
                assert torch.equal(value, before[key]), key
    reference.kind = kind
    compare(whole_model(model, group), reference_state(reference), 1e-4)


def frozen_before_or_after(rank: int, group: dist.ProcessGroup, kind: str, **options: Any) -> None:
    """Trained tables get the bits of a model in which the others were frozen before."""
    frozen = ("wide", "seen", "weighted")
    before = {name: "none" if name in frozen else kind for name in TABLES}
    found = []
    for kinds, later in ((before, ()), (kind, frozen)):
        model, optimizer = sharded(group, kinds, **options)
        if later:
            freeze(model, later)
        for step in range(3):
            train_step(model, optimizer, batch(10 * step + rank))
        found.append(whole_model(model, group))
    expected, got = found
    compare({key: got[key] for key in expected}, expected, 0)


def around_forward(rank: int, group: dist.ProcessGroup) -> None:
    """A table that is frozen in forward or in backward alone keeps its rows."""
    for in_forward in (True, False):
        model, _ = sharded(group, "adam")
        train_step(model, model.fused_optimizer, batch(rank))
        before = whole_model(model, group)
        freeze(model, TABLES if in_forward else ())
        loss, _ = model(batch(5 + rank))
        freeze(model, () if in_forward else TABLES)
        loss.backward()
        after = whole_model(model, group)
        for key in (k for k in before if "embedding" in k and not k.endswith(".iter")):
            assert torch.equal(before[key], after[key]), key


def accumulated(rank: int, group: dist.ProcessGroup) -> None:
    """Backward passes during which a table is frozen add no gradients to it."""
    ranks = dist.get_world_size(group)
    model, optimizer = sharded(group, "sgd")
    expected, other = sharded(group, "sgd")
    optimizer.zero_grad()
    with oper.accumulate(model):
        freeze(model, ("wide", "seen"))
        model(batch(rank))[0].backward()
    freeze(model, ())
    model(batch(ranks + rank))[0].backward()
    # The same by two steps of SGD that add up, as far as the tables that were frozen go.
    train_step(expected, other, batch(ranks + rank))
    got, whole = whole_model(model, group), whole_model(expected, group)
    names = [key for key in whole if ".wide." in key or ".seen." in key]
    compare({key: got[key] for key in names}, {key: whole[key] for key in names}, 0)


def unlike(rank: int, group: dist.ProcessGroup, everywhere: bool, **options: Any) -> None:
    """Ranks that freeze different tables, or of which one freezes a table, are told so, all of
    them, and no row changes."""
    model, optimizer = sharded(group, "sgd", deadline_seconds=5, **options)
    before = rows_of(model.module.bags)
    freeze(model, ("wide",) if rank else ("mean",) * everywhere)
    other = "'mean'" if everywhere else "none"
    with pytest.raises(OperError, match=f"tables is {other} on rank 0 and 'wide' on rank 1: give"):
        train_step(model, optimizer, batch(rank))
    assert all(map(torch.equal, rows_of(model.module.bags), before))
    dist.barrier(group)


def unlike_while_held(rank: int, group: dist.ProcessGroup) -> None:
    """So are ranks that freeze different tables while gradients are held back."""
    model, optimizer = sharded(group, "sgd")
    freeze(model, ("wide",) * rank)
    with oper.accumulate(model):
        model(batch(rank))[0].backward()
    freeze(model, ())
    with pytest.raises(OperError, match="in batch 1 is none on rank 0 and 'wide' on rank 1: give"):
        train_step(model, optimizer, batch(rank))
    dist.barrier(group)


def in_the_tier(rank: int, group: dist.ProcessGroup) -> None:
    """Tables of the tier are frozen before the model is sharded, or not at all."""
    model, optimizer = sharded(group, "sgd", cache=CacheSettings("50%"))
    freeze(model, ("wide",))
    with pytest.raises(OperError, match=r"table 'wide': expected a trained table in the tier"):
        train_step(model, optimizer, batch(rank))
    dist.barrier(group)
