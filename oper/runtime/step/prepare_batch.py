"""Preparing a batch: its ids become addresses, and its accesses are sorted by row.

A KeyedJaggedTensor's features are brought into the module's order where they are not, its ids are
translated by the address map, and its accesses are sorted where something needs that: backward, or
a read of distinct or remote rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from oper.base.errors import OperError
from oper.plan.address_map import AddressMap
from oper.runtime.memory.batch import PreparedBatch
from oper.runtime.memory.device import Device
from oper.runtime.step import batch_checks
from oper.runtime.step.bags import bags_on_device, bags_on_host
from oper.runtime.step.sort import Sorter
from oper.runtime.tables.features import FeatureSet
from oper.runtime.tables.optimizer_buckets import EmbeddingTable
from oper.tables.table import Table


class BatchPreparer:
    """Prepares the batches of one engine on rank `rank`.

    `bounds` says what ids out of range do: "fatal", "warning" or "ignore". `trains`: there may be
    a backward. `sort_all`: a read needs the sort, of all accesses, those of frozen tables too.
    Batches are on `device`, where the address map is.
    """

    def __init__(
        self,
        rank: int,
        planned: Sequence[Table],
        tables: Sequence[EmbeddingTable],
        features: FeatureSet,
        address_map: AddressMap,
        sorter: Sorter,
        device: Device,
        *,
        weighted: bool,
        bounds: str,
        trains: bool,
        sort_all: bool,
    ) -> None:
        self._rank, self._planned, self._tables = rank, planned, tables
        self._features, self._map, self._sorter = features, address_map, sorter
        self._device = device
        self._weighted, self._bounds = weighted, bounds
        self._trains, self._sort_all = trains, sort_all

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
        numbers = [self._tables[lookup.table].index for lookup in lookups]
        tables = torch.tensor(numbers)
        try:
            return self._translated(values, segment_offset, tables)
        except OperError:
            known = [(f, self._planned[n]) for f, n in zip(lookups, numbers, strict=True)]
            values = batch_checks.replace_bad_ids(
                values, segment_offset, known, self._rank, self._bounds
            )
            return self._translated(values, segment_offset, tables)

    def _translated(
        self, values: torch.Tensor, segment_offset: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        return self._map.translate_features(
            values, segment_offset, tables, ops=self._device.ops(), stream=self._device.stream
        )
