"""A batch of a log: for each feature its ids, bag after bag, and the size of each bag.

A feature of n samples is (values, lengths): sample i has the lengths[i] values that follow those
of samples 0 … i−1; without lengths each sample has one value. Values are int64 or, before the id
rules are applied, an Arrow dictionary of texts (int32 codes and the distinct texts), so that each
distinct text is processed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError


@dataclass(frozen=True)
class Jagged:
    """Ids of one feature: `values` int64 or `pa.DictionaryArray` of texts, `lengths` int32.

    `hexadecimal`: the log, and so errors, write its integers in hexadecimal. `unsigned`: they are
    the two's complement of unsigned 64-bit integers.
    """

    values: Any
    lengths: NDArray[np.int32] | None = None
    hexadecimal: bool = False
    unsigned: bool = False

    def shown(self, position: int) -> str:
        """Return the value at a position as the log has it."""
        value = self.values[position]
        if isinstance(value, pa.Scalar):
            return repr(value.as_py())
        number = int(value) % 2**64 if self.unsigned else int(value)
        return f"{number:08x} (hexadecimal)" if self.hexadecimal else repr(number)

    def bounds(self) -> tuple[int, int]:
        """Return the least and the largest of its integers; it must have one."""
        values = self.values.view(np.uint64) if self.unsigned else self.values
        return int(values.min()), int(values.max())

    def offsets(self) -> Ints:
        """Return the beginning of each sample's values, and their number: int64 [samples + 1]."""
        if self.lengths is None:
            return np.arange(len(self.values) + 1, dtype=np.int64)
        result = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=result[1:])
        return result

    def slice(self, start: int, stop: int) -> "Jagged":
        """Return samples start … stop − 1."""
        if self.lengths is None:
            return replace(self, values=self.values[start:stop])
        first = int(self.lengths[:start].sum(dtype=np.int64))
        lengths = self.lengths[start:stop]
        values = self.values[first : first + int(lengths.sum(dtype=np.int64))]
        return replace(self, values=values, lengths=lengths)

    def keep(self, mask: NDArray[np.bool_]) -> "Jagged":
        """Return the values where `mask` is true; samples lose the others."""
        if self.lengths is None:
            lengths = mask.astype(np.int32)
        else:
            kept = np.zeros(len(mask) + 1, dtype=np.int64)
            np.cumsum(mask, out=kept[1:])
            lengths = np.diff(kept[self.offsets()]).astype(np.int32)
        is_text = isinstance(self.values, pa.DictionaryArray)
        values = self.values.filter(pa.array(mask)) if is_text else self.values[mask]
        return replace(self, values=values, lengths=lengths)

    def sample_of(self, position: int) -> int:
        """Return the sample that the value at `position` belongs to."""
        return int(np.searchsorted(self.offsets(), position, side="right")) - 1


@dataclass(frozen=True)
class Location:
    """Place of a batch in its file: its sample i is sample `first` + i of `file`."""

    file: str
    first: int = 0
    unit: str = "row"
    # Turns a sample's number in the file into the number that errors show, if they differ.
    number_of: Callable[[int], int] | None = field(default=None, compare=False)

    def of(self, sample: int) -> str:
        """Return the location of a sample of the batch, `train.tsv, line 17`."""
        number = self.first + sample
        return f"{self.file}, {self.unit} {self.number_of(number) if self.number_of else number}"

    def after(self, samples: int) -> "Location":
        """Return the location of the batch without its first `samples` samples."""
        return Location(self.file, self.first + samples, self.unit, self.number_of)


@dataclass(frozen=True)
class Batch:
    """`samples` samples: their ids by feature and, if the log has them, label, dense values, time.

    label float32 [samples], dense float32 [samples, columns], time float64 [samples]: seconds since
    1970, or with `plain_time` the column's own numbers, whose unit is unknown.
    """

    samples: int
    features: Mapping[str, Jagged]
    location: Location
    label: NDArray[np.float32] | None = None
    dense: NDArray[np.float32] | None = None
    time: NDArray[np.float64] | None = None
    plain_time: bool = False

    def slice(self, start: int, stop: int) -> "Batch":
        """Return samples start … stop − 1."""
        if start == 0 and stop >= self.samples:
            return self
        stop = min(stop, self.samples)
        return Batch(
            samples=stop - start,
            features={name: ids.slice(start, stop) for name, ids in self.features.items()},
            location=self.location.after(start),
            label=None if self.label is None else self.label[start:stop],
            dense=None if self.dense is None else self.dense[start:stop],
            time=None if self.time is None else self.time[start:stop],
            plain_time=self.plain_time,
        )

    def to_kjt(self) -> Any:
        """Return a TorchRec `KeyedJaggedTensor` of the batch's row ids, one key for each
        feature."""
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ids = list(self.features.values())
        values = np.concatenate([i.values for i in ids]) if ids else np.empty(0, np.int64)
        lengths = [np.ones(self.samples, np.int32) if i.lengths is None else i.lengths for i in ids]
        return KeyedJaggedTensor.from_lengths_sync(
            keys=list(self.features),
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(np.concatenate(lengths) if ids else np.empty(0, np.int32)),
        )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join batches of row ids to one, at the location of the first."""
    if len(batches) == 1:
        return batches[0]
    names = batches[0].features

    def join(name: str) -> Jagged:
        parts = [b.features[name] for b in batches]
        values = np.concatenate([p.values for p in parts])
        if all(p.lengths is None for p in parts):
            return Jagged(values)
        lengths = [
            np.ones(len(p.values), np.int32) if p.lengths is None else p.lengths for p in parts
        ]
        return Jagged(values, np.concatenate(lengths))

    def stack(field_name: str) -> Any:
        parts = [getattr(b, field_name) for b in batches]
        if any(p is None for p in parts):
            if any(p is not None for p in parts):
                raise OperError(
                    f"{batches[0].location.file}: some of the log's files have a {field_name} and "
                    "others none; read them separately"
                )
            return None
        return np.concatenate(parts)

    return Batch(
        samples=sum(b.samples for b in batches),
        features={name: join(name) for name in names},
        location=batches[0].location,
        label=stack("label"),
        dense=stack("dense"),
        time=stack("time"),
        plain_time=batches[0].plain_time,
    )
