"""Batches of every structure for the tests of DispatchingLoader, with samples that can be told
apart: the label of a sample is its number in the log."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from oper.tables.table import Table

TABLES = (
    Table("narrow", 40, 4, optimizer="sgd", features=("f0", "f1")),
    Table("wide", 30, 8, optimizer="rowwise_adagrad", features=("g",)),
)
ROWS = {"f0": 40, "f1": 40, "g": 30, "unused": 9}
STRUCTURES = ("kjt", "tuple", "list", "dict", "jagged", "dataclass", "named", "torchrec", "numpy")


class Named(NamedTuple):
    ids: KeyedJaggedTensor
    label: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    ids: KeyedJaggedTensor
    more: dict[str, Any]
    label: torch.Tensor


def batch(structure: str, first: int, samples: int, bags: bool = True) -> Any:
    """Samples `first` … of the log, with 0 to 3 ids in a bag or one; as a batch of a structure."""
    numbers = np.arange(first, first + samples)
    columns = {key: [_bag(key, n, bags) for n in numbers.tolist()] for key in ROWS}
    label = torch.from_numpy(numbers.astype(np.float64))
    dense = torch.from_numpy(numbers[:, None] * np.array([[1, 10, 100]], np.float32)).bfloat16()
    ids, weighted = _keyed(columns, ["g", "f1", "f0", "unused"]), _keyed(columns, ["f0"], True)
    if structure == "kjt":
        return _keyed(columns, ["f0", "f1", "g"], weights=True)
    if structure == "tuple":
        return ids, dense, label
    if structure == "list":
        return [dense, [ids, None], label.long(), 3]
    if structure == "dict":
        return {"weighted": weighted, "dense": dense, "rest": (ids, label > 2), "scale": 0.5}
    if structure == "jagged":
        return {key: _keyed(columns, [key])[key] for key in columns} | {"label": label}
    if structure == "named":
        return Named(ids, label, "train")
    if structure == "dataclass":
        return Frozen(ids, {"mask": dense > 5, "fixed": torch.tensor(1.5), "two": (1.0, 2)}, label)
    if structure == "numpy":
        return {"ids": ids, "dense": dense.float().numpy(), "label": label.numpy()}
    return Batch(dense, ids, label)


def _bag(key: str, number: int, bags: bool) -> list[int]:
    """The ids of a sample, some of them much more frequent than others."""
    random = np.random.default_rng([number, len(key), ord(key[-1])])
    length = int(random.integers(0, 4)) if bags else 1
    return ((random.zipf(1.3, length) - 1) % ROWS[key]).tolist()


def _keyed(columns: dict[str, Any], keys: list[str], weights: bool = False) -> KeyedJaggedTensor:
    values = [i for key in keys for bag in columns[key] for i in bag]
    lengths = [len(bag) for key in keys for bag in columns[key]]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=torch.tensor(values) / 8 + 0.25 if weights else None,
    )


def samples_of(given: Any) -> list[Any]:
    """All that a batch has of each sample, without a line of the code that is tested."""
    parts = list(_columns(given))
    return [list(sample) for sample in zip(*parts, strict=True)]


def _columns(given: Any) -> Iterator[list[Any]]:
    if isinstance(given, KeyedJaggedTensor):
        for key in given.keys():  # noqa: SIM118
            yield from _columns(given[key])
    elif isinstance(given, JaggedTensor):
        yield [bag.tolist() for bag in given.to_dense()]
        if given.weights_or_none() is not None:
            yield [bag.tolist() for bag in given.to_dense_weights()]
    elif isinstance(given, torch.Tensor | np.ndarray):
        if given.ndim:
            yield [row.tolist() for row in given]
    elif isinstance(given, dict):
        for item in given.values():
            yield from _columns(item)
    elif isinstance(given, tuple | list):
        for item in given:
            yield from _columns(item)
    elif isinstance(given, Frozen | Batch):
        yield from _columns(list(vars(given).values()))
