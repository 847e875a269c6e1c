"""A batch that is ready to be looked up: its addresses, the rows that it reads, their owners, and
the accesses of each row.

Rows are ordered by bucket, then by owner, then by slot. The replicas of a bucket, which every rank
holds, come before the rows of rank 0. Accesses are sorted by row, all those of one row together: a
RUN. Or they stay in their order, and each has the number of its row.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from oper.base import native
from oper.runtime.memory.device import Device
from oper.runtime.memory.forwarded_bags import ForwardedBags
from oper.runtime.tables.kernel_structs import FEATURE

_HAS_GRADIENT = (FEATURE.names or ()).index("has_gradient")


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Distinct rows in order of bucket, owner and slot; in each bucket the replicas come first. On
    devices `slots` is as long as the batch has accesses, with undefined content beyond the rows.

    `before` counts the rows before those of each bucket and owner: replicas and `ranks` owners of
    the first bucket, of the second, and so on, and then all rows.
    """

    slots: torch.Tensor  # int64 [rows]
    before: torch.Tensor  # int64 [buckets · (1 + ranks) + 1]
    ranks: int

    def __len__(self) -> int:
        """Return the number of rows; on devices an upper bound."""
        return len(self.slots)

    def owned(self, bucket: int, owner: int) -> slice:
        """Return the slice of a bucket's rows that a rank owns."""
        return self._slice(bucket, 1 + owner, 2 + owner)

    def bucket(self, bucket: int) -> slice:
        """Return the slice of all rows of a bucket."""
        return self._slice(bucket, 0, 1 + self.ranks)

    def groups(self, bucket: int) -> range:
        """Return the numbers of a bucket's groups: of the replicas, and of each owner's rows."""
        return range(bucket * (1 + self.ranks), (bucket + 1) * (1 + self.ranks))

    def first(self, buckets: int) -> "SortedRows":
        """Return the rows of the first buckets."""
        if buckets == self.buckets:
            return self
        before = self.before[: buckets * (1 + self.ranks) + 1]
        return SortedRows(self.slots[: int(before[-1])], before, self.ranks)

    @property
    def buckets(self) -> int:
        return (len(self.before) - 1) // (1 + self.ranks)

    def row_counts(self) -> np.ndarray:
        """Return the rows by bucket and owner, int64 [buckets, 1 + ranks], replicas first."""
        return np.diff(self.before_on_host.numpy()).reshape(-1, 1 + self.ranks)

    @cached_property
    def before_on_host(self) -> torch.Tensor:
        """`before` in the host's memory; the first access waits for a device."""
        return self.before.cpu()

    @cached_property
    def _before(self) -> list[int]:
        before: list[int] = self.before_on_host.tolist()
        return before

    def _slice(self, bucket: int, first: int, last: int) -> slice:
        base = bucket * (1 + self.ranks)
        return slice(self._before[base + first], self._before[base + last])


@dataclass(frozen=True, eq=False)
class Runs(SortedRows):
    """The rows of a batch, with the accesses of each: positions[starts[i] : starts[i + 1]] are run
    i. If runs are `by_bag`, they hold the accesses' bags instead of positions, which is all that
    unweighted sums of gradients need."""

    positions: torch.Tensor  # int32 [accesses], in the batch
    starts: torch.Tensor  # int32 [rows + 1]
    by_bag: bool

    def redirected(
        self, addresses: torch.Tensor, targets: torch.Tensor, device: Device
    ) -> torch.Tensor:
        """Return addresses [N] with which the accesses of each row read it at `targets` [rows], or
        at its old address if the target is negative."""
        redirected = addresses.clone()
        of_runs = (self.positions, self.starts, targets)
        device.ops().redirect(redirected, *of_runs, device.stream)
        return redirected

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the operator oper::sort_accesses returned."""
        return [self.positions, self.starts, self.slots, self.before]

    @property
    def accesses(self) -> int:
        """The number of sorted accesses; accesses of frozen tables may be left out."""
        return len(self.positions)

    def access_counts(self) -> np.ndarray:
        """Return the accesses by bucket and owner, int64 [buckets, 1 + ranks], replicas first."""
        counts = np.diff(self.starts.numpy()[self.before.numpy()]).astype(np.int64)
        return counts.reshape(-1, 1 + self.ranks)


@dataclass(frozen=True, eq=False)
class NumberedRows(SortedRows):
    """The rows of a batch, and the row of each access by its number: −1 for an access of a frozen
    table. `accesses_before` counts accesses as `before` counts rows."""

    row_of: torch.Tensor  # int32 [N]
    accesses_before: torch.Tensor  # int64 [buckets · (1 + ranks) + 1]

    def redirected(self, addresses: torch.Tensor, targets: torch.Tensor, _: Device) -> torch.Tensor:
        """Return addresses as `Runs.redirected` does, on the CPU only."""
        redirected: torch.Tensor = native.ops().redirect_numbered(addresses, self.row_of, targets)
        return redirected

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the operator oper::number_rows returned."""
        return [self.row_of, self.slots, torch.stack([self.before, self.accesses_before])]

    @property
    def accesses(self) -> int:
        """The number of accesses, without those of frozen tables."""
        return int(self.accesses_before[-1])

    def access_counts(self) -> np.ndarray:
        """Return the accesses by bucket and owner, int64 [buckets, 1 + ranks], replicas first."""
        return np.diff(self.accesses_before.numpy()).reshape(-1, 1 + self.ranks)


BatchRows = Runs | NumberedRows


def rows_of_tensors(tensors: Sequence[torch.Tensor], ranks: int, by_bag: bool) -> BatchRows:
    """Return the rows in the result of oper::sort_accesses or oper::number_rows; the number of
    tensors tells which."""
    if len(tensors) == 3:
        row_of, slots, (before, accesses_before) = tensors
        return NumberedRows(slots, before, ranks, row_of, accesses_before)
    positions, starts, slots, before = tensors
    return Runs(slots, before, ranks, positions, starts, by_bag)


@dataclass(frozen=True)
class PreparedBatch:
    """N accesses of F features, and the rows they read (sort.py) if anything needs those.

    `offsets` are those of pooled features: None if every access has an output row of its own,
    because each sample has one access or the module pools nothing. `bags` assign the accesses to
    samples, None if each sample has one of every feature. A graph's batch has no samples.

    If bags were forwarded between nodes, accesses and features are those of the joined batch: this
    rank's own, as far as they read rows of its node, and then its clients' (`forwarded`). Output,
    samples and bags are its own.
    """

    addresses: torch.Tensor  # int64 [N]
    segment_offset: torch.Tensor  # int64 [F + 1]
    offsets: torch.Tensor | None  # [F · samples + 1]
    weights: torch.Tensor | None  # float32 [N]
    features: torch.Tensor  # int64 [F, FEATURE_WORDS]
    out_elements: int
    sort: BatchRows | Future[BatchRows] | None = None
    samples: int = 0
    bags: torch.Tensor | None = None  # [F · samples + 1]
    keys: tuple[str, ...] = ()  # of the features, in the order of the values
    trains: bool = False  # whether there may be a backward
    report: torch.Tensor | None = None  # int64 [2], if the host has not looked (late_checks.py)
    on_device: torch.Tensor | None = None  # `features` there, if gradients are summed there
    forwarded: ForwardedBags | None = None  # None: nothing is forwarded
    given: Any = None  # the KeyedJaggedTensor, by which it can be prepared again
    version: int = 0  # of the placement (placement.py) that the addresses are of
    ready: Any = None  # the device's point after its preparation; None in a step that is captured

    @property
    def features_there(self) -> torch.Tensor:
        """`features` on the device of the accesses."""
        return self.features if self.on_device is None else self.on_device

    @property
    def given_weights(self) -> torch.Tensor | None:
        """The weights of this rank's accesses, as they were given."""
        return self.weights if self.forwarded is None else self.forwarded.weights

    @property
    def own_features(self) -> torch.Tensor:
        """The rows of `features` that belong to this rank's output."""
        return self.features if self.forwarded is None else self.forwarded.features

    @property
    def lengths(self) -> torch.Tensor:
        """The number of accesses of each feature in each sample, [F, samples]."""
        assert self.keys, "a graph's batch has no samples"
        shape = (len(self.keys), self.samples)
        if self.bags is None:
            return torch.ones(1, 1, dtype=torch.int64).expand(shape)
        return self.bags.diff().view(shape)

    @property
    def read(self) -> list[torch.Tensor]:
        """The tensors of the batch that a step reads."""
        tensors = (
            self.addresses,
            self.segment_offset,
            self.offsets,
            self.weights,
            self.features,
            self.report,
            self.on_device,
        )
        rows = self.sort.tensors() if isinstance(self.sort, SortedRows) else []
        bags = [] if self.forwarded is None else [self.bags, *self.forwarded.tensors]
        return [*rows, *(tensor for tensor in (*tensors, *bags) if tensor is not None)]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the batch's device memory until the work that `stream` has by now is done, as
        TorchRec's pipelines ask for if a batch was prepared on another stream."""
        for tensor in (*self.read, self.bags):
            if tensor is not None and tensor.device.type != "cpu":
                tensor.record_stream(stream)

    @property
    def rows(self) -> BatchRows | None:
        """The rows that are read, if they were asked for; waits until they are found."""
        return self.sort.result() if isinstance(self.sort, Future) else self.sort

    @property
    def all_sorted(self) -> bool:
        """True if all accesses are sorted, those of frozen tables too."""
        return bool(self.features[:, _HAS_GRADIENT].all())

    @property
    def sorting(self) -> bool:
        """True if asking for the rows would wait."""
        return isinstance(self.sort, Future) and not self.sort.done()
