"""Preparing a batch: its ids become addresses, and its accesses are sorted by row.

A KeyedJaggedTensor's features are brought into the module's order where they are not, its ids are
translated by the address map, and its accesses are sorted where something needs that: backward, or
a read of distinct or remote rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.plan.address_map import AddressMap
from oper.runtime.memory.device import Device
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.step import batch_checks
from oper.runtime.step.sort import Sorter
from oper.runtime.tables.features import FeatureSet


class BatchPreparer:
    """Prepares the batches of one engine, which are on `device`, where the address map is.

    `bounds` says what ids out of range do: "fatal", "warning" or "ignore". With `trains` there may
    be a backward.
    """

    def __init__(
        self,
        features: FeatureSet,
        address_map: AddressMap,
        sorter: Sorter,
        device: Device,
        *,
        weighted: bool,
        bounds: str,
        trains: bool,
    ) -> None:
        self._features, self._map, self._sorter = features, address_map, sorter
        self._device, self._weighted, self._bounds = device, weighted, bounds
        self._trains = trains
        # A read that needs the positions needs those of all accesses, of frozen tables too.
        self._sort_all = sorter.by_position

    def prepare(self, batch: Any) -> PreparedBatch:
        """Translate and sort a KeyedJaggedTensor. OperError where it is not one for the module."""
        batch_checks.check_batch(batch, self._weighted, self._device.torch_device)
        order = self._features.order(batch.keys())
        bags = bags_on_host if self._device.kind == "cpu" else bags_on_device
        batch, one_each, segment_offset = bags(batch, order)
        keys, values, samples = tuple(batch.keys()), batch.values(), int(batch.stride())
        of_samples = None if one_each else batch.offsets().contiguous()
        addresses = self._translate(keys, values, segment_offset)
        descriptors, elements = self._features.describe(
            keys, samples, segment_offset, trained_only=not self._sort_all
        )
        offsets = of_samples if self._features.pooled else None
        weights = batch.weights().float().contiguous() if self._weighted else None
        read = (addresses, segment_offset, offsets, weights, descriptors)
        sort, trains = None, self._trains and torch.is_grad_enabled()
        if self._sort_all or trains:
            sort = self._sorter.sort(*read, at_once=self._sort_all)
        return PreparedBatch(
            *read,
            elements,
            sort,
            samples,
            of_samples,
            keys,
            trains,
        )

    def _translate(
        self, keys: tuple[str, ...], values: torch.Tensor, segment_offset: torch.Tensor
    ) -> torch.Tensor:
        lookups = self._features.lookups(keys)
        tables = torch.tensor([self._features.index(lookup) for lookup in lookups])
        try:
            return self._translated(values, segment_offset, tables)
        except OperError:
            known = [(lookup, self._features.planned(lookup)) for lookup in lookups]
            values = batch_checks.replace_bad_ids(
                values, segment_offset, known, self._sorter.rank, self._bounds
            )
            return self._translated(values, segment_offset, tables)

    def _translated(
        self, values: torch.Tensor, segment_offset: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        return self._map.translate_features(
            values, segment_offset, tables, ops=self._device.ops(), stream=self._device.stream
        )


# A batch whose keys are in the module's order, whether each of its bags holds one id, and where
# each feature begins: int64 [F + 1] in the host's memory.
Divided = tuple[Any, bool, torch.Tensor]


def bags_on_host(batch: Any, order: Sequence[int] | None) -> Divided:
    """Check the lengths of a KeyedJaggedTensor whose values the host can read, and bring its keys
    into `order` where that is not None. OperError where lengths and values do not fit."""
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


def bags_on_device(batch: Any, order: Sequence[int] | None) -> Divided:
    """Do what `bags_on_host` does for a batch on a device, by one read of it: all that the host
    must know comes together."""
    samples, features = int(batch.stride()), len(batch.keys())
    offsets = batch.offsets()
    if samples * features == 0 or offsets.numel() != samples * features + 1:
        batch_checks.check_offsets(batch)
        first = torch.zeros(features + 1, dtype=torch.int64)
        one_each = True
    else:
        lengths = offsets.diff()
        found = torch.cat([offsets[::samples], torch.stack(torch.aminmax(lengths))])
        *begins, least, most = found.tolist()
        if least < 0 or begins[0] or begins[-1] != batch.values().numel():
            batch_checks.check_offsets(batch)
        first, one_each = torch.tensor(begins), least == most == 1
    if order is not None:
        batch = batch.permute(order)
        lengths = first.diff()[list(order)]
        first = torch.cat([first.new_zeros(1), lengths.cumsum(0)])
    return batch, one_each, first


def _has_one_id_each(batch: Any) -> bool:
    """Whether each bag of a batch holds one id. Lengths are looked at where there are no offsets
    yet, which need not be computed then."""
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
