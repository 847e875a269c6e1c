"""What ranks do in tests of collections whose tables have different optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from oper.base.errors import OperError
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.torchrec.models import Kind, Model, Reference, batch
from tests.support.torchrec.ranks import (
    DENSE_LR,
    LR,
    compare,
    engines,
    reference_state,
    sharded,
    train_step,
    whole_model,
)


def interrupted(
    rank: int, group: dist.ProcessGroup, kind: Kind, copies: float, **options: Any
) -> None:
    """A run that steps on after a state dict, and then goes back to it, ends where one does that
    was not interrupted, and where the unsharded model does."""
    ranks = dist.get_world_size(group)
    model, optimizer = sharded(group, kind, copies, **options)
    plain, plain_optimizer = sharded(group, kind, copies, **options)
    reference = Reference(Model("cpu"), kind, LR, DENSE_LR)
    for step in range(3):
        batches = [batch(100 * step + r) for r in range(ranks)]
        train_step(plain, plain_optimizer, batches[rank])
        train_step(model, optimizer, batches[rank])
        reference.step(batches)
        if step == 0:
            states = model.fused_optimizer.state_dict()
            # Dense weights in a state dict are the model's own and not copies.
            tables = {k: v.clone() if "over" in k else v for k, v in model.state_dict().items()}
            train_step(model, optimizer, batch(rank + 7))
            model.state_dict()
            model.fused_optimizer.load_state_dict(states)
            model.load_state_dict(tables)
    found, expected = whole_model(model, group), whole_model(plain, group)
    # Collectives are over: a rank that fails now leaves none behind.
    compare(found, expected, 0)
    compare(found, reference_state(reference), 1e-4)


def loaded_in_place(rank: int, group: dist.ProcessGroup, kind: Kind, folder: Path) -> None:
    """What torch.distributed.checkpoint loads into state dicts reaches the tables, the states of
    their optimizers and Adam's number of steps, without load_state_dict."""
    model, optimizer = sharded(group, kind)
    for step in range(2):
        train_step(model, optimizer, batch(10 * step + rank))
    saved = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    save_checkpoint(saved, checkpoint_id=folder, process_group=group)
    other, other_optimizer = sharded(group, kind, device="meta")
    state = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
    load_checkpoint(state, checkpoint_id=folder, process_group=group)
    between = whole_model(other, group)
    expected = whole_model(model, group)
    train_step(model, optimizer, batch(rank + 7))
    train_step(other, other_optimizer, batch(rank + 7))
    after, expected_after = whole_model(other, group), whole_model(model, group)
    compare(between, expected, 0)
    compare(after, expected_after, 0)


def loaded_without(rank: int, group: dist.ProcessGroup, folder: Path, missing: str) -> None:
    """A checkpoint of frozen tables and of SGD lacks what another optimizer has of them: `missing`
    is named; what there is can be loaded."""
    kind = {"wide": "sgd", "mean": "adagrad", "tiny": "sgd", "other": "none"}
    rest = {"weighted": "sgd", "seen": "adam", "sorts": "none"}
    model, optimizer = sharded(group, kind | rest)
    train_step(model, optimizer, batch(rank))
    saved = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    save_checkpoint(saved, checkpoint_id=folder, process_group=group)
    before = whole_model(model, group)
    changed = {"wide": "adagrad"} if missing == "wide" else {missing: "rowwise_adagrad"}
    other, optimizer = sharded(group, kind | rest | changed, device="meta")
    state = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
    with pytest.raises(CheckpointException, match=rf"Missing key.*{missing}\.momentum1"):
        load_checkpoint(state, checkpoint_id=folder, process_group=group)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load_checkpoint(state, checkpoint_id=folder, process_group=group, planner=planner)
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optim"])
    after = whole_model(other, group)
    added = {key: after.pop(key) for key in set(after) - set(before)}
    assert [key.split("/")[1] for key in added] == [f"{missing}.momentum1"]
    assert not any(value.any() for value in added.values())
    compare(after, before, 0)
    train_step(other, optimizer, batch(rank))


def loaded_with_more(rank: int, group: dist.ProcessGroup, kind: Kind, folder: Path) -> None:
    """A checkpoint has more than tables that are frozen now, or under SGD, take of it."""
    assert not isinstance(kind, str)
    model, optimizer = sharded(group, kind)
    train_step(model, optimizer, batch(rank))
    saved = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    save_checkpoint(saved, checkpoint_id=folder, process_group=group)
    fewer = {"mean": "none", "wide": "sgd"}
    other, optimizer = sharded(group, {**kind, **fewer}, device="meta")
    state = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
    load_checkpoint(state, checkpoint_id=folder, process_group=group)
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optim"])
    found, expected = whole_model(other, group), whole_model(model, group)
    train_step(other, optimizer, batch(rank))
    gone = set(expected) - set(found)
    assert {key.split("/")[1].split(".")[0] for key in gone} == set(fewer)
    compare(found, {key: value for key, value in expected.items() if key not in gone}, 0)


def states_of_other_tables(rank: int, group: dist.ProcessGroup) -> None:
    """Rows of a state that a table's optimizer does not have are neither read nor written."""
    model, _ = sharded(
        group,
        {"wide": "sgd", "mean": "adam", "tiny": "none", "other": "adagrad"}
        | {"weighted": "sgd", "seen": "sgd", "sorts": "sgd"},
    )
    engine = engines(model)[0]
    needed = r"table 'wide': .*'exp_avg_sq'.*sgd.*has none"
    with pytest.raises(OperError, match=needed):
        engine.table_io.read([RowRange(0, 0, 1)], "exp_avg_sq")
    with pytest.raises(OperError, match=needed):
        engine.table_io.write([RowBlock(0, 0, torch.zeros(1, 16))], "exp_avg_sq")
    needed = r"table 'other': .*'exp_avg_sq'.*adagrad.*has 'momentum1'"
    with pytest.raises(OperError, match=needed):
        engine.table_io.read([RowRange(1, 0, 1), RowRange(3, 0, 1)], "exp_avg_sq")
