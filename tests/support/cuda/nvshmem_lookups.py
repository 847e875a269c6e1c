"""Lookups of ranks on two nodes by the kernels for NVSHMEM, as tests run them, with faults too."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.fetch_paths import gradient_gets
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_words
from tests.support.cuda import fake_nvshmem

REPLICA = LOCAL - 1
ROWS = 30
TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Lookup:
    """Two features of one shape of rows, the second of which reads mapped ranks alone; `stage` is
    room for so many rows in each group of threads."""

    seed: int
    dtype: str = "fp32"
    dim: int = 16
    weighted: bool = False
    mean: bool = False
    longest: int = 9
    samples: int = 12
    stage: int = 3
    int32: bool = False
    orders: tuple[int, ...] = (0, 1, 2)


def groups_of(lookup: Lookup, row_bytes: int) -> int:
    """The groups of threads of a launch of one feature, on the emulated device: two blocks of 256
    threads at the most."""
    value = {"fp32": 4, "int8": 1}.get(lookup.dtype, 2)
    wide, lanes = (8 if lookup.dtype == "int8" else 16), 32
    if row_bytes % wide == 0 and lookup.dim * value % wide == 0:
        pieces = lookup.dim * value // wide
        lanes = next((n for n in (2, 4, 8, 16) if pieces <= n), 32)
    of_block = 256 // lanes
    return of_block * min(-(-lookup.samples // of_block), 2)


def node_of(rank: int, ranks: int) -> int:
    """The first half of the ranks is on node 0."""
    return int(rank >= (ranks + 1) // 2)


def rows_of(lookup: Lookup, feature: int, rank: int) -> torch.Tensor:
    """A rank's rows as bytes, [ROWS, row_bytes]."""
    random = torch.Generator().manual_seed(1000 * lookup.seed + 10 * rank + feature)
    if lookup.dtype == "int8":
        levels = torch.randint(0, 256, (ROWS, lookup.dim), generator=random, dtype=torch.uint8)
        levels_of = torch.randn(ROWS, 2, generator=random).view(torch.uint8)
        return torch.cat([levels, levels_of], 1).contiguous()
    values = torch.randn(ROWS, lookup.dim, generator=random).to(TORCH_DTYPE[lookup.dtype])
    return values.view(torch.uint8).reshape(ROWS, -1)


class Ready:
    """A lookup's batch of one rank, the rows of all ranks in symmetric memory, each rank's as far
    in as its number says, and copies of all of them for the reference."""

    def __init__(self, lookup: Lookup, rank: int, group: Any) -> None:
        self.lookup, self.rank, self.ranks = lookup, rank, dist.get_world_size(group)
        ops, cpu = native.ops(), torch.device("cpu")
        every = [[rows_of(lookup, f, r) for r in range(self.ranks)] for f in range(2)]
        row_bytes, size = every[0][0].shape[1], every[0][0].numel()
        room = -(-size // 16) * 16
        self.memory = ops.allocate_symmetric(2 * room + 16 * self.ranks, cpu)
        self.starts = [[16 * r + f * room for r in range(self.ranks)] for f in range(2)]
        for f in range(2):
            at = self.starts[f][rank]
            self.memory[at : at + size] = every[f][rank].view(-1)
        self.symmetric = torch.tensor(
            [[self.memory.data_ptr() + at for at in of] + [0] for of in self.starts]
        )
        self.bases = torch.zeros_like(self.symmetric)
        for peer in range(self.ranks):
            mapped = ops.mapped_symmetric(self.memory, peer)
            assert bool(len(mapped)) == (node_of(peer, self.ranks) == node_of(rank, self.ranks))
            if len(mapped):
                for f in range(2):
                    self.bases[f, peer] = mapped.data_ptr() + self.starts[f][peer]
        self._kept = every
        self.copies = torch.tensor([[rows.data_ptr() for rows in of] + [0] for of in every])
        dist.barrier(group=group)  # all rows are written
        self._make_batch(row_bytes)

    def _make_batch(self, row_bytes: int) -> None:
        lookup, rank, ranks = self.lookup, self.rank, self.ranks
        random = torch.Generator().manual_seed(7 + 100 * lookup.seed + rank)
        bags = 2 * lookup.samples
        lengths = torch.randint(0, lookup.longest + 1, (bags,), generator=random)
        lengths[torch.rand(bags, generator=random) < 0.2] = 0
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.offsets = ends.int() if lookup.int32 else ends
        near = int(lengths[lookup.samples :].sum())  # accesses of the second feature
        accesses = int(lengths.sum())
        owner = torch.randint(0, ranks, (accesses,), generator=random)
        mapped = torch.tensor([node_of(r, ranks) == node_of(rank, ranks) for r in range(ranks)])
        here = mapped.nonzero()[:, 0]
        owner[accesses - near :] = here[owner[accesses - near :] % len(here)]
        own = torch.where(torch.rand(accesses, generator=random) < 0.5, LOCAL, REPLICA)
        slot = torch.randint(0, ROWS, (accesses,), generator=random)
        self.addresses = torch.where(owner == rank, own, owner) << SLOT_BITS | slot
        self.far = int((~mapped[owner]).sum())  # accesses of rows that have no pointer here
        self.weights = torch.rand(accesses, generator=random) if lookup.weighted else None
        features = np.zeros(2, FEATURE)
        features["width"], features["dtype"] = [0, 1], DTYPE_CODE[lookup.dtype]
        features["dim"], features["row_bytes"] = lookup.dim, row_bytes
        features["bags"], features["first_bag"] = lookup.samples, [0, lookup.samples]
        features["out_base"], features["out_stride"] = [0, lookup.dim], 2 * lookup.dim
        features["mean"], features["bucket"], features["has_gradient"] = lookup.mean, [0, 1], 1
        self.row_bytes, self.features = row_bytes, as_words(features)

    def expected(self) -> torch.Tensor:
        """The processor's lookup in copies of all rows."""
        found: torch.Tensor = native.ops().pooled_rows(
            self.addresses, self.offsets, self.weights, self.features, self.copies, self.rank,
            2 * self.lookup.samples * self.lookup.dim, torch.float32,
        )  # fmt: skip
        return found

    def found(self, stage: torch.Tensor) -> torch.Tensor:
        """The lookup by gets."""
        found: torch.Tensor = torch.ops.oper_emulated.pooled_rows_by_gets(
            self.addresses, self.offsets, self.weights, self.features, self.bases, self.symmetric,
            torch.tensor([True, False]), stage, self.rank,
            2 * self.lookup.samples * self.lookup.dim, torch.float32,
        )  # fmt: skip
        return found

    def fetched(self) -> torch.Tensor:
        """The lookup of what `fetch_rows` brought, as one more rank's."""
        emulated, ops = torch.ops.oper_emulated, native.ops()
        segments = self.offsets[:: self.lookup.samples].long().contiguous()
        sorted_rows = ops.sort_accesses(
            self.addresses, segments, self.features, self.rank, self.ranks, [ROWS, ROWS]
        )
        positions, run_start, slots, run_count = sorted_rows
        buffer = torch.empty((len(self.addresses) + 2) * self.row_bytes, dtype=torch.uint8)
        buffer = buffer.fill_(0xFF)
        ops.register_buffer(buffer)
        addresses, sizes = self.addresses.clone(), [self.row_bytes] * 2
        emulated.fetch_rows(
            addresses, positions, run_start, slots, run_count, self.bases, self.symmetric, [0, 1],
            sizes, torch.tensor(sizes), buffer, self.rank, 0, None,
        )  # fmt: skip
        ops.unregister_buffer(buffer)
        field = addresses >> SLOT_BITS
        assert ((field == self.ranks) | (field >= REPLICA)).all()
        others = field == self.ranks
        halves = torch.arange(len(field)) < segments[1]
        distinct = [self.addresses[others & half].unique() for half in (halves, ~halves)]
        assert len(addresses[others].unique()) == sum(map(len, distinct))
        bases = self.bases.clone()
        bases[:, self.ranks] = buffer.data_ptr()
        found: torch.Tensor = emulated.pooled_rows(
            addresses, self.offsets, self.weights, self.features, bases, self.rank,
            2 * self.lookup.samples * self.lookup.dim, torch.float32,
        )  # fmt: skip
        return found

    def brought(self) -> torch.Tensor:
        """Bytes of all ranks' memory, each from a place of its own on, brought by pieces."""
        ops, begins = native.ops(), 5 * np.arange(self.ranks)
        sizes = len(self.memory) - begins
        with patch.object(gradient_gets, "PIECE_BYTES", 100 + self.lookup.seed):
            pieces = gradient_gets.pieces_of(range(self.ranks), begins, sizes)
        buffer = torch.full((int(sizes.sum()),), 7, dtype=torch.uint8)
        ops.register_buffer(buffer)
        torch.ops.oper_emulated.get_pieces(torch.from_numpy(pieces), self.memory, buffer, 0)
        ops.unregister_buffer(buffer)
        return buffer

    def to_be_brought(self) -> torch.Tensor:
        """What `brought` should be: rows, and what symmetric memory holds at first."""
        found = []
        for rank in range(self.ranks):
            memory = torch.full_like(self.memory, 0xFF)
            for f, rows in enumerate(of[rank] for of in self._kept):
                memory[self.starts[f][rank] :][: rows.numel()] = rows.view(-1)
            found.append(memory[5 * rank :])
        return torch.cat(found)


def serve(
    rank: int, group: Any, kernels: str, library: str, lookups: list[Lookup], fetch: bool
) -> dict[str, int]:
    """Look up by gets, and by `fetch` of distinct rows too, and then bring pieces of all memory:
    how often what was found was wrong in any order of threads, and how many accesses there were to
    rows without a pointer."""
    ops = native.ops()
    ops.load_device_library(kernels)
    fake = fake_nvshmem.start(library, rank, group, node_of(rank, dist.get_world_size(group)))
    wrong = far = tried = 0
    for lookup in lookups:
        ready = Ready(lookup, rank, group)
        bytes = groups_of(lookup, ready.row_bytes) * lookup.stage * ready.row_bytes
        stage = ops.allocate_symmetric(bytes, torch.device("cpu"))
        expected = ready.expected()
        for order in lookup.orders:
            fake.order(order)
            found = [ready.found(stage), *([ready.fetched()] if fetch else [])]
            wrong += sum(not torch.equal(f.view(torch.int32), expected.view(torch.int32))
                         for f in found)  # fmt: skip
            tried += len(found)
            if fetch:
                wrong += not torch.equal(ready.brought(), ready.to_be_brought())
                tried += 1
        far += ready.far * len(lookup.orders)
        ops.free_symmetric(stage)
        ops.free_symmetric(ready.memory)
    counts = fake.counts()
    return {"wrong": wrong, "tried": tried, "far": far, **counts._asdict()}
