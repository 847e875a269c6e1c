"""Logs in memory: any iterable of TorchRec `KeyedJaggedTensor` batches.

Batches with `sparse_features`, `dense_features` and `labels` (`torchrec.datasets.utils.Batch`)
work too.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from oper.base.errors import OperError
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.logs.batches.columns import Column, Selection


class KjtSource:
    """A stream of batches. An iterator can be read once; a list or a loader several times."""

    name = "KeyedJaggedTensor batches"

    def __init__(self, batches: Iterable[Any]) -> None:
        self.samples: int | None = None
        self._batches = batches
        self._once = iter(batches) if iter(batches) is batches else None
        self._read = False
        # The first batch tells the columns; of an iterator it is kept for the only pass.
        first = next(iter(self._once or batches), None)
        if first is None:
            raise OperError(f"{self.name}: the iterable is empty")
        self._kept = [first] if self._once is not None else []
        self.columns = tuple(Column(key, bags=True) for key in _keys(first, 0))

    def count(self) -> int:
        """The number of samples."""
        return sum(_sparse(b, i).stride() for i, b in enumerate(self._pass()))

    def estimate(self) -> None:
        """None: the length of an iterable is not known."""

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """The samples in order."""
        for index, given in enumerate(self._pass()):
            kjt = _sparse(given, index)
            missing = set(selection.features).difference(_keys(given, index))
            if missing:
                raise OperError(f"{self.name}, batch {index}: has no key {min(missing)!r}")
            location = Location(f"{self.name}, batch {index}", 0, "sample")
            batch = Batch(
                kjt.stride(),
                {name: _jagged(kjt[name], name, location) for name in selection.features},
                location,
                label=_array(given, "labels"),
                dense=_array(given, "dense_features"),
            )
            for start in range(0, batch.samples, selection.batch_rows):
                yield batch.slice(start, start + selection.batch_rows)

    def _pass(self) -> Iterator[Any]:
        if self._once is None:
            yield from self._batches
            return
        if self._read:
            raise OperError(
                f"{self.name}: an iterator can be read only once, and this needs another pass; "
                "give a list or a loader, or tables with their rows stated"
            )
        self._read = True
        yield from self._kept
        self._kept = []
        yield from self._once


def _sparse(batch: Any, index: int) -> Any:
    kjt = getattr(batch, "sparse_features", batch)
    if not hasattr(kjt, "keys") or not hasattr(kjt, "stride"):
        raise OperError(
            f"{KjtSource.name}, batch {index}: is {type(batch).__name__}, and a KeyedJaggedTensor "
            "was needed"
        )
    return kjt


def _keys(batch: Any, index: int) -> list[str]:
    return list(_sparse(batch, index).keys())


def _jagged(tensor: Any, name: str, location: Location) -> Jagged:
    values = tensor.values().detach().cpu().numpy()
    if not np.issubdtype(values.dtype, np.integer):
        raise OperError(
            f"{location.file}: the values of key {name!r} are {values.dtype}, and integers, the "
            "ids of rows, were needed"
        )
    return Jagged(
        values.astype(np.int64),
        tensor.lengths().cpu().numpy().astype(np.int32),
    )


def _array(batch: Any, name: str) -> Any:
    tensor = getattr(batch, name, None)
    return None if tensor is None else tensor.detach().cpu().numpy().astype(np.float32)
