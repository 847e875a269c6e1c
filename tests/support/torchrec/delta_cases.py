"""What ranks do in tests of `oper.save_delta`: functions that `Ranks` run.

All save the same moment twice: as a base and deltas in `folder/run`, and whole in `folder/whole`.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oper
from oper.base.errors import OperError
from oper.checkpoint.shard_file import ShardFile
from tests.support.torchrec.migration_cases import plans
from tests.support.torchrec.models import Kind, batch
from tests.support.torchrec.ranks import engines, sharded, train_step, whole_model
from tests.support.torchrec.saved_cases import (
    dense_adam,
    small_model,
    small_pieces,
    small_step,
)

DELTAS = 3


def few(seed: int, rank: int) -> Any:
    """A batch of a sample, which reads few rows."""
    return batch(1000 * seed + rank, samples=1)


def saved_in_links(
    rank: int,
    group: dist.ProcessGroup,
    kind: Kind,
    folder: Path,
    moves: bool = False,
    accumulates: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train and save a base and deltas, with steps of a migration in between where it `moves`; then
    the same moment whole. The model's values then."""
    model, _ = sharded(group, kind, **options)
    dense = dense_adam(model)
    train_step(model, dense, batch(rank))
    loader = {"epoch": 0}

    def state() -> dict[str, Any]:
        return {"dense": dense, "loader": dict(loader)}

    with small_pieces():
        oper.save(model, folder / "run" / "0", step=0, state=state(), deltas=True)
        migration = None
        if moves:
            there = plans(group, 2, cached="cache" in options)[1]
            migration = oper.migrate(model, there, bytes_per_step=2000)
        for number in range(1, 1 + DELTAS):
            for step in range(2):
                if accumulates:
                    with oper.accumulate(model):
                        model(few(77 * number + step, rank))[0].backward()
                train_step(model, dense, few(10 * number + step, rank))
                if migration is not None and not migration.done:
                    migration.step()
            loader["epoch"] = number
            oper.save_delta(model, folder / "run" / str(number), step=number, state=state())
            if number == 2:  # what was marked stays, and one that is not taken up does no harm
                oper.save(model, folder / "aside")
        if migration is not None:
            assert migration.steps_made > 3
        oper.save(model, folder / "whole", step=DELTAS, state=state())
    return whole_model(model, group)


def loaded_from_links(
    rank: int, group: dist.ProcessGroup, kind: Kind, folder: Path, **options: Any
) -> dict[str, Any]:
    """Load the newest into a model that has other values."""
    model, _ = sharded(group, kind, 1.0, "meta", **options)
    dense, loader = dense_adam(model), {"epoch": 0}
    with small_pieces():
        made = oper.load(model, folder / "run", state={"dense": dense, "loader": loader})
    assert (made.step, made.folder, loader) == (DELTAS, folder / "run" / "3", {"epoch": DELTAS})
    assert (made.grown, made.new, made.skipped) == ({}, (), ())
    return whole_model(model, group)


def gone_on_with(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A job that was started again, under another plan and maybe on other ranks, goes on with
    deltas; so do two, upon the same link."""
    for job in range(2):
        model, _ = sharded(group, "adam", 1.0 * job)
        dense = dense_adam(model)
        oper.load(model, folder / "run" / "2", state={"dense": dense}, deltas=True)
        for number in range(3):
            train_step(model, dense, few(50 * job + number, rank))
            name = f"{job}-{number}"
            oper.save_delta(model, folder / "run" / name, step=10 + number, state={"dense": dense})
        oper.save(model, folder / f"whole-{job}", step=12, state={"dense": dense})


def written_otherwise(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Rows that no step changed, but a state dict or `reset_parameters`, are in the delta."""
    model, optimizer = sharded(group, "adam")
    oper.save(model, folder / "run" / "0", step=0, deltas=True)
    held = model.state_dict()
    (shard,) = held["bags.embedding_bags.wide.weight"].local_shards()
    shard.tensor[:2] = 7.0 + rank  # in place, and nothing uses the tables before the save
    oper.save_delta(model, folder / "run" / "1", step=1)
    assert whole_model(model, group)["bags.embedding_bags.wide.weight"][0, 0] == 7.0
    # A state's rows come to be known while the weights are already looked at.
    states = model.fused_optimizer.state_dict()["state"]
    key = "embedding_bags.other.weight"
    (moment,) = next(v for k, v in states.items() if k.endswith(key))[
        "other.momentum1"
    ].local_shards()
    moment.tensor[1:3] = 0.25
    oper.save_delta(model, folder / "run" / "2", step=2)
    model.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "seen" in k}, strict=False
    )
    train_step(model, optimizer, few(3, rank))
    model.module.weighted.reset_parameters()
    oper.save_delta(model, folder / "run" / "3", step=3)
    oper.save(model, folder / "whole", step=3)


def nothing_changed(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A delta without rows."""
    model, _ = sharded(group, "adam")
    oper.save(model, folder / "run" / "0", step=0, deltas=True)
    oper.save_delta(model, folder / "run" / "1", step=1)
    oper.save(model, folder / "whole", step=1)


def grown_between(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A table that had fewer rows in the base, and one that it lacked, are whole in the chain."""
    old = small_model(group, {"a": (37, 8), "gone": (5, 4)}, "adam")
    small_step(old, 5, ("a", "gone"))
    oper.save(old, folder / "run" / "0", step=0)
    model = small_model(group, {"a": (90, 8), "fresh": (6, 4)}, "adam")
    with small_pieces():
        oper.load(model, folder / "run", deltas=True)
        small_step(model, 3, ("a", "fresh"))
        oper.save_delta(model, folder / "run" / "1", step=1)
        small_step(model, 4, ("a", "fresh"))
        oper.save_delta(model, folder / "run" / "2", step=2)
        oper.save(model, folder / "whole", step=2)
        torch.manual_seed(99)  # initial values of the model that loads are others
        found = small_model(group, {"a": (90, 8), "fresh": (6, 4)}, "adam")
        oper.load(found, folder / "run")
    expected = whole_model(model, group)
    for key, value in whole_model(found, group).items():
        assert torch.equal(value, expected[key]), key


def refused(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """What cannot be saved is refused on all ranks, and the next delta has what it would have."""
    model, optimizer = sharded(group, "adagrad")
    run = folder / "run"
    with pytest.raises(OperError, match=r"nothing marked them: begin by oper\.save"):
        oper.save_delta(model, run / "1")
    oper.save(model, run / "0", step=0)
    with pytest.raises(OperError, match="nothing marked them"):
        oper.save_delta(model, run / "1")
    oper.save(model, run / "0", step=0, overwrite=True, deltas=True)
    train_step(model, optimizer, few(1, rank))
    with pytest.raises(OperError, match="lies beside what it is upon"):
        oper.save_delta(model, folder / "elsewhere" / "1")
    with pytest.raises(OperError, match="exists; choose another path"):
        oper.save_delta(model, run / "0")
    with pytest.raises(OperError, match="'touched' is a delta's own name"):
        oper.save_delta(model, run / "1", state={"touched": {}})
    oper.save_delta(model, run / "1", step=1)
    train_step(model, optimizer, few(2, rank))
    with pytest.raises(OperError, match="1 is a delta upon it, which could not be loaded any more"):
        oper.save(model, run / "0", overwrite=True)
    oper.save_delta(model, run / "2", step=2)
    # Another checkpoint has taken the place of the last one.
    oper.save(model, run / "2", step=2, overwrite=True)
    with pytest.raises(OperError, match="2, upon which it would be, is another checkpoint now"):
        oper.save_delta(model, run / "3")
    assert oper.load(model, run, deltas=True).step == 2
    oper.save_delta(model, run / "3", step=3)
    oper.load(model, run / "0")
    with pytest.raises(OperError, match="nothing marked them"):
        oper.save_delta(model, run / "4")
    # Where nothing asked for deltas, nothing is kept.
    assert not any(engine.heap.touched.begun for engine in engines(model))


def failing_disk(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A delta that one rank cannot write is not there, and the next one has its rows too."""
    model, optimizer = sharded(group, "adam")
    oper.save(model, folder / "run" / "0", step=0, deltas=True)
    train_step(model, optimizer, few(1, rank))

    def write(file: ShardFile, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(ShardFile, "write", write)
        with pytest.raises(OperError, match=r"rank 1 could not write its part \(No space left"):
            oper.save_delta(model, folder / "run" / "1", step=1)
    dist.barrier(group)
    assert [path.name for path in (folder / "run").iterdir()] == ["0"]
    dist.barrier(group)
    train_step(model, optimizer, few(2, rank))
    oper.save_delta(model, folder / "run" / "2", step=2)
    oper.save(model, folder / "whole", step=2)


def damaged(rank: int, group: dist.ProcessGroup, folder: Path, message: str) -> None:
    """All ranks refuse a broken chain, for the same reason, and can train on."""
    model, optimizer = sharded(group, "adam")
    with pytest.raises(OperError, match=message):
        oper.load(model, folder)
    train_step(model, optimizer, few(1, rank))
