"""What ranks do in tests of state dicts that are held while others are taken or loaded."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.torchrec.models import batch
from tests.support.torchrec.ranks import compare, engines, sharded, train_step, whole, whole_model

# A table, its state and its number of steps; the same state of another table of the collection.
KEY, MOMENT, STEPS = "bags.embedding_bags.wide.weight", "wide.momentum1", "wide.iter"
OTHER_KEY, OTHER_MOMENT = "bags.embedding_bags.mean.weight", "mean.momentum1"


def trained(rank: int, group: dist.ProcessGroup, steps: int = 1) -> Any:
    model, optimizer = sharded(group, "adam")
    for step in range(steps):
        train_step(model, optimizer, batch(10 * step + rank))
    return model


def states_of(model: Any) -> dict[str, Any]:
    return model.fused_optimizer.state_dict()["state"]


def use(model: Any, rank: int) -> None:
    """After which what was handed out is no longer written back."""
    with torch.no_grad():
        model(batch(rank))


def written(held: Any, states: Any, rank: int, value: float) -> None:
    """Write into state dicts: of the weight on rank 0 alone, of the moment on rank 1 alone."""
    if rank == 0:
        held[KEY].local_shards()[0].tensor[2:4] = value
    else:
        states[KEY][MOMENT].local_shards()[0].tensor.fill_(value)
    states[KEY][STEPS].fill_(int(value))


def expected_after(before: dict[str, Any], value: float) -> dict[str, Any]:
    expected = {key: given.clone() for key, given in before.items()}
    expected[KEY][2:4] = value
    expected[f"{KEY}/{MOMENT}"][25:] = value
    for key in expected:
        if key.endswith(".iter") and key.startswith("bags."):
            expected[key].fill_(value)
    return expected


def taken_twice(rank: int, group: dist.ProcessGroup) -> None:
    """A second state dict has what was written into the first, and so do the tables, also what is
    written into the first afterwards."""
    model = trained(rank, group)
    before = whole_model(model, group)
    held, states = model.state_dict(), states_of(model)
    written(held, states, rank, 5.0)
    second = dict(model.state_dict())
    for key, of_table in states_of(model).items():
        second |= {f"{key}/{name}": value for name, value in of_table.items()}
    compare(whole(second, group), expected_after(before, 5.0), 0)
    written(held, states, rank, 6.0)
    use(model, rank)
    compare(whole_model(model, group), expected_after(before, 6.0), 0)
    count = next(
        of_table[STEPS] for of_table in model.fused_optimizer.state.values() if STEPS in of_table
    )
    count.state_dict().fill_(7)
    assert int(count.state_dict()) == 7


def loaded_over(rank: int, group: dist.ProcessGroup) -> None:
    """What is loaded, or set, stays although a state dict is held that was written to before."""
    model, other = trained(rank, group), trained(rank, group, 3)
    expected = whole_model(other, group)
    held, states = model.state_dict(), states_of(model)
    written(held, states, rank, 5.0)
    model.load_state_dict(other.state_dict())
    model.fused_optimizer.load_state_dict(other.fused_optimizer.state_dict())
    use(model, rank)
    compare(whole_model(model, group), expected, 0)
    states = states_of(model)
    states[KEY][STEPS].fill_(5)
    model.fused_optimizer.set_optimizer_step(9)
    use(model, rank)
    assert {engine.optimizer_steps for engine in engines(model)} == {9}
    held = model.state_dict()
    held[KEY].local_shards()[0].tensor.fill_(5.0)
    torch.manual_seed(3)
    model.module.bags.reset_parameters()
    made = whole(model.state_dict(), group)
    use(model, rank)
    compare(whole(model.state_dict(), group), made, 0)
    assert not (made[KEY] == 5.0).any()


def loaded_beside(rank: int, group: dist.ProcessGroup) -> None:
    """What was written into a state dict stays although other values are loaded, or set: the number
    of steps, all weights, or the same state of another table."""
    model, other = trained(rank, group), trained(rank, group, 3)
    expected = expected_after(whole_model(model, group), 5.0)
    held, states = model.state_dict(), states_of(model)
    written(held, states, rank, 5.0)
    model.fused_optimizer.set_optimizer_step(9)
    use(model, rank)
    for key in expected:
        if key.endswith(".iter"):
            expected[key].fill_(9)
    compare(whole_model(model, group), expected, 0)
    moment = states_of(model)[KEY][MOMENT].local_shards()[0].tensor
    if rank == 1:
        moment.fill_(6.0)
    model.load_state_dict(other.state_dict())
    use(model, rank)
    expected |= whole(other.state_dict(), group)
    expected[f"{KEY}/{MOMENT}"][25:] = 6.0
    compare(whole_model(model, group), expected, 0)
    moment = states_of(model)[KEY][MOMENT].local_shards()[0].tensor
    if rank == 1:
        moment.fill_(7.0)
    states_by_name = {n: s for of in model.fused_optimizer.state.values() for n, s in of.items()}
    loaded = expected[f"{OTHER_KEY}/{OTHER_MOMENT}"]
    loaded.fill_(8.0)
    states_by_name[OTHER_MOMENT].load_state_dict(loaded.float())
    use(model, rank)
    expected[f"{KEY}/{MOMENT}"][25:] = 7.0
    compare(whole_model(model, group), expected, 0)
