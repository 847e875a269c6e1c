"""The `state` of checkpoints: every optimizer and every container that a save takes is loaded."""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import oper
from oper.base.errors import OperError
from oper.checkpoint.reshard import reshard
from oper.checkpoint.saved_index import read_index
from oper.checkpoint.saved_tables import tables_of
from oper.checkpoint.verify import verify
from tests.support.torchrec import saved_cases as cases
from tests.support.torchrec.models import Model, batch
from tests.support.torchrec.one_rank import plan_of
from tests.support.torchrec.ranks import OPTIMIZERS, compare, put_optimizer, train_step

DENSE: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum_sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}
ARRANGEMENTS = ["plain", "keyed", "tables", "combined", "named", "with groups"]


def made(kind: str, dense: str, arrangement: str = "plain") -> tuple[Any, Any, Any]:
    """A model on one rank, the optimizer that is saved, and the dense one."""
    model = Model("cpu")
    put_optimizer(model, kind)
    sharded: Any = oper.shard(model, plan_of(model), env=ShardingEnv.from_local(1, 0))
    layers = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    if arrangement == "plain":
        plain = DENSE[dense](layers.values())
        return sharded, plain, plain
    keyed, tables = KeyedOptimizerWrapper(layers, DENSE[dense]), sharded.fused_optimizer
    named = arrangement == "named"
    parts: Any = [("tables", tables), ("layers", keyed)] if named else [tables, keyed]
    combined = CombinedOptimizer(parts)
    combined.save_param_groups(arrangement == "with groups")
    alone = {"keyed": keyed, "tables": tables}
    return sharded, alone.get(arrangement, combined), keyed


def content(model: Any, dense: Any) -> dict[str, Any]:
    """Copies of all values of a model, of its tables' optimizers and of the dense one."""
    found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for part, states in (("tables", model.fused_optimizer.state_dict()), ("", dense.state_dict())):
        for key, values in states["state"].items():
            found |= {
                f"{part}/{key}/{name}": torch.as_tensor(value).clone()
                for name, value in values.items()
                if value is not None
            }
    return {key: value.double() for key, value in found.items()}


@pytest.mark.parametrize(
    ("kind", "dense", "arrangement"),
    [("adam", "adam", arrangement) for arrangement in ARRANGEMENTS]
    + [(kind, "adam", "combined") for kind in OPTIMIZERS if kind != "adam"]
    + [("adam", dense, how) for dense in DENSE if dense != "adam" for how in ("plain", "combined")],
)
def test_every_optimizer_is_loaded_whole_and_from_deltas(
    tmp_path: Path, kind: str, dense: str, arrangement: str
) -> None:
    model, optimizer, layers = made(kind, dense, arrangement)
    run, expected = tmp_path / "run", []
    for step, save in enumerate((oper.save, oper.save_delta)):
        train_step(model, layers, batch(step, samples=4 if step else 64))
        options = {} if step else {"deltas": True}
        save(model, run / str(step), step=step, state={"dense": optimizer}, **options)
        expected.append(content(model, layers))
    reshard(run / "1", tmp_path / "whole", 3)
    assert verify(run / "1").ok
    for folder, values in ((run / "0", 0), (run / "1", 1), (tmp_path / "whole", 1)):
        for trained in (False, True):
            other, other_optimizer, other_layers = made(kind, dense, arrangement)
            if trained:
                train_step(other, other_layers, batch(7))
            oper.load(other, folder, state={"dense": other_optimizer})
            # The dense optimizer is in the checkpoint unless the tables' alone was given.
            wanted, found = expected[values], content(other, other_layers)
            if arrangement == "tables":
                wanted = {k: v for k, v in wanted.items() if not k.startswith("/")}
                found = {k: v for k, v in found.items() if not k.startswith("/")}
            compare(found, wanted, 0)


@pytest.mark.parametrize("arrangement", ["plain", "combined", "named", "with groups"])
@pytest.mark.parametrize("dense", DENSE)
def test_a_stepped_optimizer_takes_a_checkpoint_of_before_its_first_step(
    tmp_path: Path, dense: str, arrangement: str
) -> None:
    model, optimizer, _ = made("adagrad", dense, arrangement)
    oper.save(model, tmp_path / "run", state={"dense": optimizer})
    found = []
    for trained in (False, True):
        other, other_optimizer, other_layers = made("adagrad", dense, arrangement)
        if trained:
            for step in range(2):
                train_step(other, other_layers, batch(7 + step))
        oper.load(other, tmp_path / "run", state={"dense": other_optimizer})
        train_step(other, other_layers, batch(3))
        found.append(content(other, other_layers))
    compare(found[1], found[0], 0)


def test_an_optimizer_of_which_nothing_was_saved_is_named(tmp_path: Path) -> None:
    """A keyed optimizer has nothing to save before its first step."""
    model, optimizer, layers = made("adagrad", "adam", "keyed")
    oper.save(model, tmp_path / "run", state={"dense": optimizer})
    train_step(model, layers, batch(0))
    with pytest.raises(OperError, match=r"has no 'dense\.state\..*', which the model or its state"):
        oper.load(model, tmp_path / "run", state={"dense": optimizer})


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
def test_combined_optimizers_go_to_other_ranks(worlds, tmp_path, kind):
    saved = worlds.run(2, cases.saved_combined, kind, tmp_path)[0]
    for ranks in (2, 3):
        compare(worlds.run(ranks, cases.loaded_combined, kind, tmp_path)[0], saved, 0)


def test_a_table_that_the_model_lacks_is_passed_over_in_combined_optimizers(worlds, tmp_path):
    worlds.run(2, cases.combined_grown, tmp_path)


def test_the_tables_of_a_checkpoint_are_the_models_own(tmp_path: Path) -> None:
    model, optimizer, layers = made("adagrad", "sgd", "combined")
    train_step(model, layers, batch(0))
    average = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    oper.save(model, tmp_path / "made", state={"a copy": average, "dense": optimizer})
    tables = tables_of(read_index(tmp_path / "made")).values()
    names = {tensor.name.partition(".")[0] for t in tables for tensor in t.tensors.values()}
    assert names == {"model", "optimizer"}
    assert {name for t in tables for name in t.states} == {"momentum1"}


STATES: dict[str, Any] = {
    "nested": {"a": [{"b": [1, [torch.ones(2), {"c": (1, "x")}]]}], "d": {3: {-4: {True: 5}}}},
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4)],
    "objects": {"none": None, "text": "ä", "set": {1, 2}, "tuple": (1, (2.5, None)), "empty": []},
    "ordered": OrderedDict(x=OrderedDict(y=torch.ones(1)), z=[]),
    "generator": torch.get_rng_state(),
    "python": list(random.Random(1).getstate()),
    "names": {"a.b": 1, "a": {"c": 2}, "": 3, "ü/\n": 4},
    "keys": {0.5: 1, None: 2, (1, 2): 3},
}


def emptied(value: Any) -> Any:
    """A copy with other values at the leaves, in containers that are as they were or empty."""
    if isinstance(value, dict):
        return type(value)((key, emptied(part)) for key, part in value.items())
    return [] if isinstance(value, list) else torch.zeros_like(value) if _is_tensor(value) else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def assert_equal(found: Any, expected: Any) -> None:
    """Raise AssertionError unless two values are of equal kinds and have equal leaves."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif _is_tensor(expected):
        assert torch.equal(found, expected)
    else:
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("name", STATES)
def test_containers_are_loaded_as_they_were_saved(tmp_path: Path, name: str) -> None:
    model, _, _ = made("sgd", "sgd")
    oper.save(model, tmp_path / "run" / "0", step=0, state={"x": {"y": STATES[name]}}, deltas=True)
    oper.save_delta(model, tmp_path / "run" / "1", step=1, state={"x": {"y": STATES[name]}})
    for folder in (tmp_path / "run" / "0", tmp_path / "run"):
        into = {"x": {"y": emptied(STATES[name])}}
        oper.load(model, folder, state=into)
        assert_equal(into["x"]["y"], STATES[name])


class Opaque:
    """A class that a load would have to run code of."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": {"a.b": 1, "a": {"b": 2}}}, r"saved under one name .*x\.a\.b"),
        ({"x": {1: 1, "1": 2}}, r"saved under one name .*x\.1"),
        ({"model.bags.embedding_bags.wide.weight": 1}, r"saved under one name .*model\.bags"),
        ({"x": {"y": Opaque()}}, r"'x\.y' is a Opaque, which could not be loaded again"),
        ({"x": np.ones(2)}, "'x' is a ndarray, which could not be loaded again"),
        ({"x": {"y": [np.random.default_rng(0)]}}, r"'x\.y' is a list, which could not be loaded"),
        ({3: 1}, "a name in state: expected str, got int"),
        ({"touched": {}}, "'touched' is a delta's own name"),
        ({"delta_upon": {}}, "'delta_upon' is a delta's own name"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, state: dict[Any, Any], message: str
) -> None:
    model, _, _ = made("sgd", "sgd")
    with pytest.raises(OperError, match=message):
        oper.save(model, tmp_path / "made", state=state)
    assert not (tmp_path / "made").exists()
