"""A file in partition folders: its samples, with the folders' keys as columns."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.columns import Column, Selection, Source
from oper.logs.batches.timestamps import times_of
from oper.logs.formats.arrow_columns import floats_of, ids_of
from oper.logs.log_folder import Key


class PartitionedSource:
    """File with an additional column for each partition key that the file itself lacks.

    Keys have the same value for all samples of the file, so they are features only if the user
    names them.
    """

    def __init__(self, file: Source, keys: Mapping[str, Key]) -> None:
        self.name = file.name
        self._file = file
        in_file = {column.name for column in file.columns}
        self._keys = {name: key for name, key in keys.items() if name not in in_file}
        self.columns = (
            *file.columns,
            *(
                Column(name, "other", texts=isinstance(key.value, str), reason="a partition key")
                for name, key in self._keys.items()
            ),
        )

    @property
    def samples(self) -> int | None:
        return self._file.samples

    def count(self) -> int:
        return self._file.count()

    def estimate(self) -> int | None:
        return self._file.estimate()

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
        keys = self._keys
        of_file = replace(
            selection,
            features=tuple(n for n in selection.features if n not in keys),
            dense=tuple(n for n in selection.dense if n not in keys),
            label=None if selection.label in keys else selection.label,
            time=None if selection.time in keys else selection.time,
        )
        if of_file == selection:
            yield from self._file.batches(selection)
        elif of_file.features or of_file.dense or of_file.label or of_file.time:
            for batch in self._file.batches(of_file):
                yield self._with_keys(batch, selection, of_file)
        else:  # Some readers read all columns if none is asked for.
            samples, location = self.count(), Location(self.name)
            for first in range(0, samples, selection.batch_rows):
                size = min(selection.batch_rows, samples - first)
                yield self._with_keys(Batch(size, {}, location.after(first)), selection, of_file)

    def _with_keys(self, batch: Batch, selection: Selection, of_file: Selection) -> Batch:
        """Return the batch of the columns `of_file`, with the keys of `selection`."""

        def values(name: str, is_time: bool = False) -> pa.Array:
            key = self._keys[name]
            return pa.repeat(pa.scalar(key.time if is_time else key.value), batch.samples)

        features = {
            name: batch.features[name]
            if name in batch.features
            else ids_of(values(name), name, batch.location)
            for name in selection.features
        }
        result = replace(batch, features=features)
        if selection.label != of_file.label and selection.label is not None:
            label = floats_of(values(selection.label), selection.label, batch.location)
            result = replace(result, label=label)
        if selection.dense != of_file.dense:
            dense = [
                batch.dense[:, of_file.dense.index(name)]
                if batch.dense is not None and name in of_file.dense
                else floats_of(values(name), name, batch.location)
                for name in selection.dense
            ]
            result = replace(result, dense=np.stack(dense, axis=1))
        if selection.time != of_file.time and selection.time is not None:
            times = values(selection.time, is_time=True)
            time, plain = times_of(times, selection.time, batch.location, selection.time_unit)
            result = replace(result, time=time, plain_time=plain)
        return result
