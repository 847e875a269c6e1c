"""Reading and writing rows of tables by id, wherever they are: for initial values and checkpoints.

A rank reads the copy that its own address map names. It writes all copies, even those that their
own rank does not read. A state of an optimizer is read and written only in the buckets that have
it: tables of one module may have different optimizers, and frozen tables have none. The rows that
were touched since a moment are found here from all ranks' marks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base import native
from oper.base.errors import OperError
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan
from oper.runtime.comm.exchange import AllToAll
from oper.runtime.memory.heap import TableMemory
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_words
from oper.runtime.tables.optimizer_buckets import TORCH_DTYPE, Bucket, EmbeddingTable

_BARRIER_ACTION = "read or write tables"
# Bytes on a device at a time, in addition to its rows, while rows go through the host's memory.
_DEVICE_PIECE_BYTES = 1 << 26


class RowRange(NamedTuple):
    """Rows [first, first + rows) of a table of the module, by its number."""

    table: int
    first: int
    rows: int


class ListedRows(NamedTuple):
    """Rows of a table of the module by their ids, int64 [n]."""

    table: int
    ids: torch.Tensor


class RowBlock(NamedTuple):
    """Values of rows from `first` on, [n, dim], or [n] of a row-wise state."""

    table: int
    first: int
    values: torch.Tensor


def _ids(rows: RowRange | ListedRows) -> torch.Tensor:
    if isinstance(rows, ListedRows):
        return rows.ids
    return torch.arange(rows.first, rows.first + rows.rows)


class TableIO:
    """The rows of a module's tables. All ranks call this together, each with rows of its own."""

    def __init__(
        self,
        plan: Plan,
        tables: Sequence[EmbeddingTable],
        memory: TableMemory,
    ) -> None:
        self._plan, self._tables, self._buckets = plan, tables, memory.buckets
        self._heap, self._node, self._device = memory.heap, memory.node, memory.heap.device
        self._signals, self._all_to_all = memory.signals, memory.all_to_all
        self._map = AddressMap.of(plan, self._node.rank)
        self._maps_of_copies: dict[int, AddressMap] = {}

    def read(
        self, requests: Sequence[RowRange | ListedRows], state: str | None
    ) -> list[torch.Tensor]:
        """Return rows of tables, float32 [rows, dim] each; or a state of the optimizer, [rows, dim]
        or [rows]."""
        self._barrier()
        results: list[torch.Tensor] = [torch.empty(0)] * len(requests)
        for bucket in self._buckets_with(state, [asked.table for asked in requests]):
            mine = [n for n, asked in enumerate(requests) if asked.table in bucket.tables]
            addresses = [self._address(self._map, requests[n]) for n in mine]
            sizes = [len(part) for part in addresses]
            values = self._gather(
                bucket, torch.cat(addresses) if addresses else torch.empty(0, dtype=torch.int64),
                state is not None,
            )  # fmt: skip
            if state is not None and mine:
                values = values[:, bucket.optimizer.state_slices(bucket.dim)[state]]
                if any(s.rowwise for s in bucket.optimizer.states if s.name == state):
                    values = values[:, 0]
            for n, part in zip(mine, values.split(sizes), strict=True):
                # A view would keep the whole tensor in memory.
                results[n] = (
                    part if part.nbytes == values.untyped_storage().nbytes() else part.clone()
                )
        self._barrier()
        return results

    def write(self, blocks: Sequence[RowBlock], state: str | None) -> None:
        """Give all copies of the blocks' rows new values, of the rows or of a state."""
        self._barrier()
        with self._heap.writable():
            for bucket in self._buckets_with(state, [table for table, _, _ in blocks]):
                mine = [block for block in blocks if block[0] in bucket.tables]
                self._write_bucket(bucket, mine, state)
        self._barrier()

    def touched(self, asked: Sequence[RowRange]) -> torch.Tensor:
        """Return a mask of the rows that this rank asks for: true for rows that any rank touched,
        bool [rows]. `asked` has the request of each rank."""
        known = [torch.from_numpy(np.packbits(self._touched_here(rows))) for rows in asked]
        group, rows = self._node.group, asked[self._node.rank].rows
        parts = known if group is None else AllToAll(group).send(known, "say which rows it updated")
        every = np.bitwise_or.reduce([part.numpy() for part in parts])
        return torch.from_numpy(np.unpackbits(every, count=rows).astype(bool))

    def _touched_here(self, rows: RowRange) -> NDArray[np.bool_]:
        """Return a mask of the rows that this rank knows to be touched, bool [rows]."""
        touched, table = self._heap.touched, self._tables[rows.table].index
        at = self._address(self._map_of_copies(self._node.rank), rows)
        held = (at >> SLOT_BITS) == LOCAL
        width = int(self._plan.layout.width_of_table[table])
        mask: NDArray[np.bool_] = np.zeros(rows.rows, dtype=bool)
        mask[held.numpy()] = touched.marked(width, at[held] & SLOT_MASK).numpy()
        mask[touched.aside(table, rows.first, rows.rows)] = True
        return mask

    def _barrier(self) -> None:
        """Wait until every rank has finished its reads or writes."""
        self._device.synchronize()
        self._signals.barrier(_BARRIER_ACTION)

    def _write_bucket(self, bucket: Bucket, blocks: Sequence[RowBlock], state: str | None) -> None:
        encoded = [self._encoded(bucket, values, state) for _, _, values in blocks]
        columns = encoded[0].shape[1] if encoded else self._columns(bucket, state)
        slots_out, rows_out = [], []  # for each rank that shares no memory with this one
        for rank in range(self._node.ranks):
            slots: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
            rows: list[torch.Tensor] = [self._empty(columns, state)]
            for (table, first, _), stored in zip(blocks, encoded, strict=True):
                these = RowRange(table, first, len(stored))
                at = self._address(self._map_of_copies(rank), these)
                held = (at >> SLOT_BITS) == LOCAL
                if rank in self._node.peers:
                    self._put(bucket, rank, at[held] & SLOT_MASK, stored[held], state)
                else:
                    slots.append(at[held] & SLOT_MASK)
                    rows.append(stored[held])
            slots_out.append(torch.cat(slots))
            rows_out.append(torch.cat(rows))
        if self._all_to_all is None:
            return
        slots_in = self._all_to_all.send(slots_out, "write tables")
        rows_in = self._all_to_all.send(rows_out, "write tables")
        for at, given in zip(slots_in, rows_in, strict=True):
            self._put(bucket, self._node.rank, at, given, state)

    def _buckets_with(self, state: str | None, tables: Sequence[int]) -> list[Bucket]:
        """Return the buckets that have a state, or all buckets if `state` is None. Raise OperError
        if one of `tables` is in none of them."""
        # All ranks must find equal buckets, whatever each asks for, because they exchange rows
        # bucket by bucket.
        buckets = [b for b in self._buckets if state is None or state in b.states]
        if lacking := set(tables).difference(*(bucket.tables for bucket in buckets)):
            number = min(lacking)
            optimizer = self._tables[number].optimizer
            names = ", ".join(repr(part.name) for part in optimizer.states) or "none"
            raise OperError(
                f"table {self._plan.tables[self._tables[number].index].name!r}: state {state!r} of "
                f"its optimizer was asked for, and optimizer {optimizer.kind} has {names}; ask "
                "only for the states that a table's optimizer has"
            )
        return buckets

    def _map_of_copies(self, rank: int) -> AddressMap:
        if rank not in self._maps_of_copies:
            self._maps_of_copies[rank] = AddressMap.of_copies(self._plan, rank)
        return self._maps_of_copies[rank]

    def _address(self, by: AddressMap, rows: RowRange | ListedRows) -> torch.Tensor:
        return by.translate(self._tables[rows.table].index, _ids(rows))

    def _gather(self, bucket: Bucket, addresses: torch.Tensor, state: bool) -> torch.Tensor:
        """Return the values at addresses, float32 [n, dim], or the optimizer's [n, state
        values]."""
        arenas = {
            rank: (self._heap.state if state else self._heap.rows)(bucket.width, rank)
            for rank in self._node.peers
        }
        size = arenas[self._node.rank].shape[1]
        values = bucket.optimizer.state_bytes(bucket.dim) // 4 if state else bucket.dim
        place = self._device.torch_device
        bases = torch.zeros(len(self._heap.bases), self._node.ranks + 1, dtype=torch.int64)
        for rank, arena in arenas.items():
            bases[bucket.width, rank] = arena.data_ptr()
        buffer = self._fetch(addresses, arenas[self._node.rank], size)
        if not values or not len(addresses):
            return torch.empty(len(addresses), values)
        parts = []
        feature = np.zeros(1, FEATURE)
        feature["width"], feature["row_bytes"] = bucket.width, size
        feature["dtype"] = 0 if state else DTYPE_CODE[bucket.dtype]
        feature["dim"] = feature["out_stride"] = values
        for part in self._pieces(addresses, 4 * values):
            there, kept = self._with_fetched(part, buffer)
            bases[bucket.width, self._node.ranks] = kept.data_ptr()
            feature["bags"] = len(part)
            out = self._device.ops().pooled_rows(
                there, None, None, as_words(feature), bases.to(place), self._node.rank,
                len(part) * values, torch.float32, self._device.stream,
            )  # fmt: skip
            parts.append(out.view(-1, values).cpu())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _with_fetched(
        self, addresses: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the addresses on the device, and the fetched rows that they read there."""
        if self._device.kind == "cpu":
            return addresses, buffer
        fetched = addresses >> SLOT_BITS == self._node.ranks
        rows = buffer[addresses[fetched] & SLOT_MASK] if len(buffer) else buffer
        numbers = (self._node.ranks << SLOT_BITS) + torch.arange(len(rows))
        moved = addresses.masked_scatter(fetched, numbers)
        return moved.to(self._device.torch_device), rows.to(self._device.torch_device)

    def _pieces(self, given: torch.Tensor, row_bytes: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of a tensor that are on the device one at a time, so that tables that
        fill a device can be read and written; the whole tensor on the CPU."""
        if self._device.kind == "cpu":
            return (given,)
        return given.split(max(_DEVICE_PIECE_BYTES // row_bytes, 1))

    def _fetch(self, addresses: torch.Tensor, own: torch.Tensor, size: int) -> torch.Tensor:
        """Return rows of ranks that share no memory; the addresses are changed to read them
        here."""
        if self._all_to_all is None:
            return torch.empty(0, dtype=torch.uint8)
        field, asked, at = addresses >> SLOT_BITS, [], 0
        for rank in range(self._node.ranks):
            wanted = field == rank if rank not in self._node.peers else torch.zeros_like(field) > 0
            asked.append(addresses[wanted] & SLOT_MASK)
            addresses[wanted] = (self._node.ranks << SLOT_BITS) + torch.arange(
                at, at + len(asked[-1])
            )
            at += len(asked[-1])
        place = self._device.torch_device
        answers = [
            torch.cat([own[part.to(place)].cpu() for part in self._pieces(slots, size)])
            for slots in self._all_to_all.send(asked, "read tables")
        ]
        return torch.cat(self._all_to_all.send(answers, "read tables"))

    def _encoded(self, bucket: Bucket, values: torch.Tensor, state: str | None) -> torch.Tensor:
        """Return values as they are stored: [n, row bytes], or float32 [n, values] of a state. The
        result is on the host, wherever the values were."""
        values = values.cpu()
        if state is not None:
            return values.to(torch.float32).reshape(len(values), self._columns(bucket, state))
        if bucket.dtype == "int8":
            return native.ops().quantise_rows(values.to(torch.float32).contiguous())
        stored = values.to(TORCH_DTYPE[bucket.dtype]).contiguous()
        return stored.view(torch.uint8).reshape(len(values), self._columns(bucket, None))

    def _columns(self, bucket: Bucket, state: str | None) -> int:
        if state is None:
            return self._heap.rows(bucket.width).shape[1]
        part = bucket.optimizer.state_slices(bucket.dim)[state]
        return part.stop - part.start

    @staticmethod
    def _empty(columns: int, state: str | None) -> torch.Tensor:
        return torch.empty(0, columns, dtype=torch.uint8 if state is None else torch.float32)

    def _put(
        self, bucket: Bucket, rank: int, slots: torch.Tensor, rows: torch.Tensor, state: str | None
    ) -> None:
        if not len(slots):
            return
        place = self._device.torch_device
        arena = self._heap.rows(bucket.width, rank)
        if state is not None:
            part = bucket.optimizer.state_slices(bucket.dim)[state]
            arena = self._heap.state(bucket.width, rank).view(torch.float32)[:, part]
        row_bytes = rows.shape[1] * rows.element_size()
        pieces = (self._pieces(given, max(row_bytes, 1)) for given in (slots, rows))
        for at, values in zip(*pieces, strict=True):
            arena[at.to(place)] = values.to(place)
