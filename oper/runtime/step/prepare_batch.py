"""Preparing a batch: its ids become addresses, and its accesses are sorted by row.

A KeyedJaggedTensor's features are brought into the module's order, its ids are translated by the
address map, and its accesses are sorted if something needs that: backward, or a fetch path that
needs the rows of a batch. Bags of pooled tables are exchanged before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.fetch_paths.fetch_path import Accesses, FetchPath
from oper.runtime.memory.device import Cuda, Device
from oper.runtime.memory.placement import Placement
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.memory.step_room import NO_ROOM, StepRoom
from oper.runtime.step import batch_checks
from oper.runtime.step.device_copies import DeviceCopies
from oper.runtime.step.late_checks import LateChecks
from oper.runtime.step.sort import Sorter
from oper.runtime.tables.features import Feature, FeatureSet
from oper.runtime.tables.kernel_structs import as_features
from oper.tables.table import Table


class BatchPreparer:
    """The preparation of one engine's batches, by the present map of `placement`; batches and map
    are on `device`.

    `bounds` is the treatment of ids out of range: "fatal", "warning" or "ignore". With `trains`
    there may be a backward.
    """

    def __init__(
        self,
        features: FeatureSet,
        placement: Placement,
        sorter: Sorter,
        device: Device,
        room: StepRoom,
        path: FetchPath,
        *,
        weighted: bool,
        bounds: str,
        trains: bool,
    ) -> None:
        self._features, self._placement, self._sorter = features, placement, sorter
        self._device, self._room, self._path = device, room, path
        # If hosts of several nodes wait for each other in a lookup, an error of a batch on a device
        # is raised at once: the host waits in any case.
        self._together = path.needs.together
        self._weighted, self._bounds = weighted, bounds
        self._trains = trains
        self._late = None
        if isinstance(device, Cuda):
            self._late = LateChecks(device, sorter.rank, bounds)
        self._tables_there: dict[tuple[str, ...], torch.Tensor] = {}
        self._segments_there, self._features_there = DeviceCopies(device), DeviceCopies(device)
        # A read of rows reads all of them, of frozen tables too.
        self._sort_all = path.needs.rows

    def prepare(self, batch: Any) -> PreparedBatch:
        """Translate and sort a KeyedJaggedTensor. Raise OperError if it does not fit the module; on
        a device, if an earlier batch had invalid ids or lengths."""
        self._device.check_no_capture()
        if self._late is not None:
            self._late.tell()
        batch_checks.check_batch(batch, self._weighted, self._device.torch_device)
        try:
            prepared = self._prepared(batch)
            # A captured step prepares and looks up on one stream.
            ready = self._device.point() if self._device.capture is None else None
            version = self._placement.version
            return replace(prepared, given=batch, version=version, ready=ready)
        except NO_ROOM as error:
            raise self._room.error(error, batch.values().numel()) from error

    @property
    def late(self) -> LateChecks | None:
        """The checks of batches on a device."""
        return self._late

    def again(self, batch: PreparedBatch) -> PreparedBatch:
        """Return a batch that was prepared before rows moved, with present addresses."""
        with torch.set_grad_enabled(batch.trains):
            return self.prepare(batch.given)

    def _prepared(self, batch: Any) -> PreparedBatch:
        order, original = self._features.order(batch.keys()), batch
        if self._late is None:
            batch, one_each, segment_offset = bags_on_host(batch, order)
            report, of_samples = None, None if one_each else batch.offsets().contiguous()
            addresses = self._translate(tuple(batch.keys()), batch.values(), segment_offset)
        else:
            captured = self._device.capture is not None
            bring = ordered_by_counts if captured else bags_on_device
            batch, segment_offset, on_host = bring(batch, order, self._features.pooled)
            report, of_samples = self._late.report(), batch.offsets().contiguous()
            there = self._segments_there.of(segment_offset) if on_host else segment_offset
            addresses = self._translate_unseen(batch, there, report)
            self._late.expect(report, original, order, self._planned(tuple(batch.keys())))
        keys, samples = tuple(batch.keys()), int(batch.stride())
        descriptors, elements = self._features.describe(
            keys, samples, segment_offset, trained_only=not self._sort_all
        )
        if self._late is not None:
            segment_offset = there
            if self._together:
                self._late.tell(all_of_them=True, now=original)
        offsets = of_samples if self._features.pooled else None
        weights = batch.weights().float().contiguous() if self._weighted else None
        own = Accesses(addresses, segment_offset, offsets, weights, descriptors)
        read, forwarded = self._path.prepare(own)
        on_device = None
        if self._late is not None and self._trains:
            on_device = self._features_there.of(_shifted(read.features, len(keys), elements))
        sort, trains = None, self._trains and torch.is_grad_enabled()
        if self._sort_all or trains:
            sort = self._sorter.sort(*read, at_once=self._sort_all, report=report)
        return PreparedBatch(
            *read,
            elements,
            sort,
            samples,
            of_samples,
            keys,
            trains,
            report,
            on_device,
            forwarded,
        )

    def finish(self) -> None:
        """Raise OperError if an earlier batch had invalid ids or lengths."""
        if self._late is not None:
            self._late.tell(all_of_them=True)

    def _translate(
        self, keys: tuple[str, ...], values: torch.Tensor, segment_offset: torch.Tensor
    ) -> torch.Tensor:
        tables = self._tables(keys)
        try:
            return self._placement.map.translate_features(values, segment_offset, tables)
        except OperError:
            values = batch_checks.replace_bad_ids(
                values, segment_offset, self._planned(keys), self._sorter.rank, self._bounds
            )
            return self._placement.map.translate_features(values, segment_offset, tables)

    def _translate_unseen(
        self, batch: Any, segment_offset: torch.Tensor, report: torch.Tensor
    ) -> torch.Tensor:
        """Translate a batch on a device; its errors are raised with a later batch."""
        keys, values = tuple(batch.keys()), batch.values()
        on, ops, stream = self._device.torch_device, self._device.ops(), self._device.stream
        if keys not in self._tables_there:
            self._tables_there[keys] = self._tables(keys).to(on)
        ops.check_bags(batch.offsets().contiguous(), values.numel(), report, stream)
        return self._placement.map.translate_features(
            values,
            segment_offset,
            self._tables_there[keys],
            ops=ops,
            stream=stream,
            report=report,
        )

    def _tables(self, keys: tuple[str, ...]) -> torch.Tensor:
        """Return the number of each feature's table in the plan, int64 [F]."""
        lookups = self._features.lookups(keys)
        return torch.tensor([self._features.index(lookup) for lookup in lookups], dtype=torch.int64)

    def _planned(self, keys: tuple[str, ...]) -> list[tuple[Feature, Table]]:
        lookups = self._features.lookups(keys)
        return [(lookup, self._features.planned(lookup)) for lookup in lookups]


def _shifted(descriptors: torch.Tensor, own: int, shift: int) -> torch.Tensor:
    """Return the features' descriptors by which gradients are summed: the gradient of the bags of
    clients, whose features come after this rank's `own`, lies `shift` values after the output's."""
    if len(descriptors) == own:
        return descriptors
    shifted = descriptors.clone()
    as_features(shifted)["out_base"][own:] += shift
    return shifted


# A batch whose keys are in the module's order, whether each of its bags holds one id, and the
# beginnings of its features: int64 [F + 1] in the host's memory.
Divided = tuple[Any, bool, torch.Tensor]
# A batch on a device, the beginnings of its features, and whether these are on the host.
DividedThere = tuple[Any, torch.Tensor, bool]


def bags_on_host(batch: Any, order: Sequence[int] | None) -> Divided:
    """Check the lengths of a KeyedJaggedTensor whose values the host can read, and bring its keys
    into `order` if that is not None. Raise OperError if lengths and values do not fit."""
    one_each = _has_one_id_each(batch)
    if not one_each:
        batch_checks.check_offsets(batch)
    if order is not None:
        batch = batch.permute(order)
        one_each = one_each or _has_one_id_each(batch)
    samples, features = int(batch.stride()), len(batch.keys())
    if one_each:
        return batch, True, torch.arange(features + 1) * samples
    return batch, False, batch.offsets()[::samples].to(torch.int64).contiguous()


def bags_on_device(batch: Any, order: Sequence[int] | None, pooled: bool) -> DividedThere:
    """Bring the keys of a batch on a device into `order`, and find the start of each feature: on
    the device, unless the host must know the size of an output that is not pooled. In that case the
    host waits for the device if the batch has no lengths of its keys on the host. It also waits to
    bring keys into another order, which moves values by lengths that must fit."""
    if order is not None:
        batch_checks.check_offsets(batch)
        batch = batch.permute(order)
    samples, features = int(batch.stride()), len(batch.keys())
    offsets = batch.offsets()
    if samples * features == 0 or offsets.numel() != samples * features + 1:
        batch_checks.check_offsets(batch)
        return batch, torch.zeros(features + 1, dtype=torch.int64), True
    if pooled:
        return batch, batch_checks.segment_offset(batch), False
    lengths = batch.length_per_key_or_none()
    begins = offsets[::samples].tolist() if lengths is None else [0, *accumulate(lengths)]
    ascending = all(begin <= end for begin, end in pairwise(begins))
    if begins[0] or begins[-1] != batch.values().numel() or not ascending:
        batch_checks.check_offsets(batch)
    return batch, torch.tensor(begins), True


def ordered_by_counts(batch: Any, order: Sequence[int] | None, pooled: bool) -> DividedThere:
    """Do as `bags_on_device` in a step that is captured, in which the host cannot look at lengths.
    A batch whose keys are in another order, or whose output is not pooled, must have the number of
    its keys' values on the host. Lengths of other numbers are reported as lengths that do not fit.
    """
    bags = int(batch.stride()) * len(batch.keys())
    if batch.offsets().numel() != bags + 1:
        batch_checks.check_offsets(batch)
    if order is None and pooled:
        return batch, batch_checks.segment_offset(batch), False
    counts = batch.length_per_key_or_none()
    if counts is None:
        why = "the output is not pooled" if order is None else "keys have to be brought into order"
        raise OperError(
            f"a step is captured, and {why}, for which the host must know how many values each key "
            "has: call the batch's length_per_key() before it is put on the device"
        )
    if order is not None:
        batch = _taken(batch, order, [0, *accumulate(counts)])
    if pooled:
        return batch, batch_checks.segment_offset(batch), False
    begins = [0, *accumulate(counts if order is None else [counts[key] for key in order])]
    return batch, torch.tensor(begins), True


def _taken(batch: Any, order: Sequence[int], begins: Sequence[int]) -> Any:
    """Return some keys of a batch, whose values begin at `begins`."""
    samples, keys = int(batch.stride()), list(batch.keys())
    lengths, values, weights = batch.offsets().diff(), batch.values(), batch.weights_or_none()
    spans = [slice(begins[key], begins[key + 1]) for key in order]
    return type(batch)(
        [keys[key] for key in order],
        torch.cat([values[span] for span in spans]),
        None if weights is None else torch.cat([weights[span] for span in spans]),
        stride=samples,
        lengths=torch.cat([lengths[key * samples : (key + 1) * samples] for key in order]),
    )


def _has_one_id_each(batch: Any) -> bool:
    """Return whether each bag of a batch holds one id. If there are no offsets yet, lengths are
    enough, and offsets need not be computed."""
    bags = batch.stride() * len(batch.keys())
    if batch.values().numel() != bags:
        return False
    lengths = batch.lengths_or_none()
    if batch.offsets_or_none() is None and lengths.numel() == bags > 0:
        least, most = lengths.aminmax()
        return int(least) == int(most) == 1
    offsets = batch.offsets().contiguous()
    one_each: bool = offsets.numel() == bags + 1 and native.ops().one_per_bag(offsets)
    return one_each
