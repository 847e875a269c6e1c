"""Counting inside a live model: the reads of its collections of tables in training or serving.

with oper.record(model) as recorder:
    train(model)
recorder.profile().save("profile")

Collections are watched at their inputs, so batches may look like anything, and the model may be
sharded by TorchRec, by OPER, or not at all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from oper.base.errors import OperError, check_type
from oper.logs.batches.batch import Batch, Location
from oper.logs.formats.keyed_jagged import jagged, keyed_jagged_tensors, samples_of
from oper.profiling.profile import Profile
from oper.profiling.row_counters import RowCounters
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import collections_of, tables_of, tables_of_collection


class Recorder:
    """The counters of a model's collections on this rank; made by `record`."""

    def __init__(self, model: Any) -> None:
        tables_of(model)  # It refuses models without tables, and tables of one name.
        self._counted = {path: CollectionCounters(path, c) for path, c in collections_of(model)}

    def watch(self) -> ExitStack:
        """Count from now on; close the returned stack to stop."""
        stack = ExitStack()
        for counted in self._counted.values():
            stack.enter_context(watched(counted.collection, counted.count))
        return stack

    def profile(self, samples: int | None = None) -> Profile:
        """Return the profile of this rank's counts so far.

        Args:
            samples: how many samples that was. Required if the collections saw different
                numbers, as when one is read twice for each sample: accesses are per sample.

        Raises:
            OperError: nothing was counted, or the collections saw different numbers of samples.
        """
        counted = [each.counters for each in self._counted.values()]
        seen = {path or "model": each.counters.samples for path, each in self._counted.items()}
        if not any(seen.values()):
            raise OperError(
                "the recorder counted nothing: run the model, as `model(batch)` or in a pipeline, "
                "inside `with oper.record(model) as recorder`"
            )
        if samples is None and len(set(seen.values())) > 1:
            numbers = ", ".join(f"{path}: {number:,}" for path, number in seen.items())
            raise OperError(
                f"the model's collections saw different numbers of samples ({numbers}): say how "
                "many the model was given, profile(samples=…)"
            )
        return Profile(
            tuple(table for part in counted for table in part.tables),
            max(seen.values()) if samples is None else samples,
            _joined([part.accesses for part in counted]),
            _joined([part.samples_with_row for part in counted]),
            tuple(bagged for part in counted for bagged in part.bagged),
            source={"recorded": sorted(seen)},
            bag_lengths=BagLengths.joined([part.bag_lengths for part in counted]),
        )


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Count which rows the collections of a model read while this is open.

    Args:
        model: any `torch.nn.Module` with TorchRec's EmbeddingBagCollections or
            EmbeddingCollections: unsharded, or sharded by TorchRec or OPER. Ids are rows.

    Yields:
        A recorder, whose `profile()` is that of this rank's batches; `oper profiles merge` adds
        those of several ranks.

    Raises:
        OperError: the model has no collection, or two of its tables have one name. An id that is
            not a row of its table is an error where it is read.
    """
    check_type("record", "model", model, nn.Module)
    recorder = Recorder(model)
    with recorder.watch():
        yield recorder


@contextmanager
def watched(collection: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Call `count`, while this is open, with the input of a collection for each batch, before the
    batch is read. Pipelines skip the forward of a sharded collection, and call its `input_dist`
    themselves."""

    def before(_: Any, arguments: Any, named: Any) -> None:
        if not getattr(collection, "is_pipelined", False):
            count((arguments, named))

    before.counts_batches = True  # type: ignore[attr-defined]  # on the host: see oper.graph_step
    with ExitStack() as stack:
        stack.callback(collection.register_forward_pre_hook(before, with_kwargs=True).remove)
        if hasattr(collection, "input_dist"):
            stack.enter_context(_watched_input_dist(collection, count))
        yield


@contextmanager
def _watched_input_dist(collection: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Replace `input_dist` while anything watches it; watches may begin and end in any order."""
    counts = getattr(vars(collection).get("input_dist"), "counts", None)
    if counts is None:
        counts = []
        input_dist: Callable[..., Any] = collection.input_dist

        def watched_input_dist(context: Any, *arguments: Any, **named: Any) -> Any:
            if getattr(collection, "is_pipelined", False):
                for watcher in counts:
                    watcher((arguments, named))
            return input_dist(context, *arguments, **named)

        watched_input_dist.counts = counts  # type: ignore[attr-defined]
        collection.input_dist = watched_input_dist
    counts.append(count)
    try:
        yield
    finally:
        counts.remove(count)
        if not counts:
            del collection.input_dist


class CollectionCounters:
    """Counters of one collection of tables; `path` is its place in the model, for errors.

    Ids that are no rows are errors, or count as row 0 if `reads_row_0` says that the model reads
    row 0 for them.
    """

    def __init__(self, path: str, collection: Any, reads_row_0: bool = False) -> None:
        self.collection = collection
        self.counters = RowCounters(tables_of_collection(collection))
        self._where = f"collection {path or type(collection).__name__}"
        self._reads_row_0 = reads_row_0
        self._batches = 0

    def count(self, given: Any) -> None:
        """Count the ids that the collection is given for a batch, in any of its forms.

        Raises OperError if a feature is missing, or an id is not a row and such ids are errors.
        """
        location = Location(f"{self._where}, batch {self._batches}", 0, "sample")
        tensors = keyed_jagged_tensors(given)
        held = {key: tensor for tensor in tensors for key in list(tensor.keys())}
        features, table_of = {}, {}
        read = [name for table in self.counters.tables for name in table.features]
        for number, table in enumerate(self.counters.tables):
            for name in table.features:
                if name not in held:
                    raise OperError(f"{location.file}: has no feature {name!r}")
                # A feature that several tables read is counted in each.
                key = name if read.count(name) == 1 else f"{name}@{table.name}"
                ids = jagged(held[name][name], name, location)
                if self._reads_row_0:
                    is_row = (ids.values >= 0) & (ids.values < table.rows)
                    ids = replace(ids, values=np.where(is_row, ids.values, 0))
                features[key] = ids
                table_of[key] = number
        batch = Batch(samples_of(tensors, location.file), features, location)
        self.counters.add(batch, table_of)
        self._batches += 1

    def take(self) -> RowCounters:
        """Return the counts so far, and start again from zero."""
        counted, self.counters = self.counters, RowCounters(self.counters.tables)
        return counted


def _joined(parts: list[Any]) -> Any:
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return np.concatenate([part.astype(widest, copy=False) for part in parts])
