"""Batches whose gradients are summed by row, and arenas whose rows are updated by them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import SLOT_BITS, SLOT_MASK
from oper.runtime.tables.kernel_structs import DTYPE_CODE
from oper.runtime.tables.optimizers import STATES, Optimizer, packed_settings
from tests.support.cuda.devices import Device
from tests.support.runtime.accesses import random_accesses, sorted_runs

TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FILLED = -(2.0**100)  # no sum is that
LR = 0.3
KINDS = [kind for kind in STATES if kind != "none"]

# Optimizers of all kinds, with settings that differ.
optimizers = st.builds(
    Optimizer,
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([1e-8, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    decoupled=st.booleans(),
    betas=st.just((0.6, 0.8)),
    stochastic_rounding=st.booleans(),
)


class Batch:
    """Gradients of the bags of a batch, and its accesses sorted by row.

    `dims` are the buckets' and `gap` the values between two bags' gradients. `hot` accesses of the
    first feature, in the middle of it, read one row. Slots are below `arena`, a prime.
    """

    def __init__(
        self,
        seed: int,
        sizes: list[int],
        dims: list[int],
        *,
        ranks: int = 2,
        slots: int = 50,
        hot: int = 0,
        arena: int = 2**31 - 1,
        gap: int = 0,
        offset_type: type | None = None,
        weighted: bool = False,
        means: bool = False,
        by_bag: bool = False,
        frozen: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        accesses = random_accesses(rng, ranks, sizes, len(dims), slots, 10, frozen)
        # Rows that are read often are to lie anywhere among the others.
        field, slot = accesses.addresses >> SLOT_BITS, accesses.addresses & SLOT_MASK
        accesses.addresses[:] = field << SLOT_BITS | slot * 48271 % arena
        accesses.bucket_slots = [arena] * len(dims)
        if hot:
            first = (sizes[0] - hot) // 2
            accesses.addresses[first : first + hot] = accesses.addresses[first]
        features, self.dims = accesses.features, dims
        bags = np.array(sizes, dtype=np.int64)
        offsets = np.arange(sum(sizes) + 1)
        if offset_type is not None:
            bags = np.array([int(rng.integers(1, size + 3)) for size in sizes])
            lengths = [
                rng.multinomial(size, np.full(of_feature, 1 / of_feature))
                for size, of_feature in zip(sizes, bags, strict=True)
            ]
            offsets = np.append(0, np.cumsum(np.concatenate(lengths))).astype(offset_type)
        features["dim"] = np.array(dims)[features["bucket"]]
        features["bags"], features["first_bag"] = bags, np.cumsum(bags) - bags
        features["out_stride"] = features["dim"] + gap
        room = bags * features["out_stride"]
        features["out_base"] = np.cumsum(room) - room
        features["mean"] = rng.integers(0, 2, len(sizes)) if means else 0
        self.means = bool(features["mean"].any())

        position, start, slots_of_runs, before = sorted_runs(accesses)
        self.slots = torch.from_numpy(slots_of_runs)
        self.sorted = accesses.tensors()
        if by_bag:
            position = np.searchsorted(offsets, position, side="right") - 1
        self.arena = arena
        self.codes, self.before = ranks + 1, before
        self.groups = torch.from_numpy(np.stack([before, self._places()]))
        self.grad = torch.from_numpy(rng.standard_normal(room.sum())).to(dtype)
        self.positions = torch.from_numpy(position.astype(np.int32))
        self.run_start = torch.from_numpy(start.astype(np.int32))
        self.accesses, self.scale, self.by_bag = sum(sizes), 1 / 3, by_bag
        self.offsets = None if offset_type is None else torch.from_numpy(offsets)
        self.weights = torch.randn(self.accesses) if weighted else None
        self.features = accesses.words
        self.segment_offset = torch.from_numpy(accesses.segment_offset)

    def _places(self) -> list[int]:
        """Values before each group's: a bucket's begin at a multiple of 16."""
        places = [0]
        for group, rows in enumerate(np.diff(self.before)):
            bucket, code = divmod(group, self.codes)
            if code == 0:
                places[-1] = -(-places[-1] // 16) * 16
            places.append(places[-1] + int(rows) * self.dims[bucket])
        return places

    def calls(self) -> Iterator[tuple[int, int, int]]:
        """Bucket, first and last group of calls that sum all runs: replicas apart from others."""
        for bucket in range(len(self.dims)):
            first = bucket * self.codes
            yield bucket, first, first + 1
            yield bucket, first + 1, first + self.codes

    def values(self) -> torch.Tensor:
        return torch.full((int(self.groups[1, -1]) + 3,), FILLED)

    def arguments(self) -> Iterator[list[Any]]:
        """Those of the operator but for `values` and `by_bag`, of all calls."""
        for bucket, first, last in self.calls():
            runs = [self.positions, self.run_start, self.groups, bucket, first, last]
            batch = [self.offsets, self.weights, self.features, self.segment_offset]
            yield [self.grad, *runs, *batch, self.dims[bucket], self.scale]

    def on_the_processor(self) -> torch.Tensor:
        values = self.values()
        for arguments in self.arguments():
            native.ops().sum_gradients(*arguments, values, self.by_bag)
        return values

    def on(self, device: Device, order: int = 0, sort: bool = False) -> torch.Tensor:
        """Of runs that the device sorted, or of the processor's, with room for all accesses: what
        lies beyond is anything."""

        def put(given: Any) -> Any:
            return device.put(given) if isinstance(given, torch.Tensor) else given

        def with_room(tensor: torch.Tensor, size: int) -> Any:
            beyond = torch.full((size - len(tensor),), 2**30, dtype=tensor.dtype)
            return put(torch.cat([tensor, beyond]))

        positions = with_room(self.positions, self.accesses)
        run_start = with_room(self.run_start, self.accesses + 1)
        if sort:
            addresses, segments, features, *rest = self.sorted
            read = [put(addresses), put(segments), features, *rest]
            read.append(put(self.offsets) if self.by_bag else None)
            found = device.start("sort_accesses", *read, device.stream, None, order=order)
            positions, run_start, _, before = found
            assert torch.equal(before.cpu(), self.groups[0])
        values = put(self.values())
        for arguments in self.arguments():
            how = [self.by_bag, device.stream, self.means]
            on_device = [*map(put, arguments), values, *how]
            on_device[1:3] = positions, run_start
            device.start("sum_gradients", *on_device, order=order)
        summed: torch.Tensor = values.cpu()
        return summed

    def by_definition(self, piece: int) -> torch.Tensor:
        """float32 sums of pieces of so many accesses, without offsets and weights."""
        values = self.values()
        features, starts = self.features, self.run_start.tolist()
        for bucket, first, last in self.calls():
            (first_run, at), (last_run, _) = self.groups[:, [first, last]].T.tolist()
            dim = self.dims[bucket]
            for run in range(first_run, last_run):
                pieces: list[torch.Tensor] = []
                positions = self.positions[starts[run] : starts[run + 1]].tolist()
                for n, position in enumerate(positions):
                    if n % piece == 0:
                        pieces.append(torch.zeros(dim))
                    f = int(torch.searchsorted(self.segment_offset, position, right=True)) - 1
                    base, stride = features[f, 7:9].tolist()
                    place = base + (position - int(self.segment_offset[f])) * stride
                    pieces[-1] += self.grad[place : place + dim].float()
                total = torch.zeros(dim)
                for of_piece in pieces:
                    total += of_piece
                out = at + (run - first_run) * dim
                values[out : out + dim] = (total if len(pieces) > 1 else pieces[0]) * self.scale
        return values


class Arena:
    """Rows and state; a slot has room for more than they take. `marks` are of rows updated."""

    def __init__(
        self, optimizer: Optimizer, dtype: str, values: torch.Tensor, spare: tuple[int, int]
    ) -> None:
        self.optimizer, self.dtype, self.dim = optimizer, dtype, values.shape[1]
        bytes = values.to(TORCH_DTYPE[dtype]).view(torch.uint8)
        width = optimizer.state_bytes(self.dim) + spare[1]
        empty = torch.zeros(len(values), spare[0], dtype=torch.uint8)
        self.rows = torch.cat([bytes.reshape(len(values), -1), empty], 1).contiguous()
        self.state = torch.zeros(len(values), width, dtype=torch.uint8)
        self.marks = torch.zeros(len(values), dtype=torch.bool)

    def arguments(self, step: int) -> list[Any]:
        settings = self.optimizer.settings(LR, step)
        return [self.dim, DTYPE_CODE[self.dtype], self.optimizer.kind, settings]

    def settings_on(self, device: Device, step: int) -> tuple[list[float], torch.Tensor | None]:
        """Those of a step as a kernel's argument; of each other step in the device's memory, beside
        an argument that is of another step."""
        settings = self.optimizer.settings(LR, step)
        if step % 2:
            return list(settings), None
        return list(self.optimizer.settings(LR / 2, step + 7)), device.put(
            packed_settings(settings)
        )


def assert_equal_arenas(found: Arena, expected: Arena) -> None:
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.state, expected.state)
    assert torch.equal(found.marks, expected.marks)
