"""Reading and writing rows of tables by id, whoever holds them: for initial values and checkpoints.

A rank reads the copy that its own address map names. It writes all copies: a row lies on rank j if
it is LOCAL to the map of j. A state of an optimizer is read and written in the buckets that have
it, and in no others: tables of one module may have different optimizers, and frozen ones have none.
"""

from collections.abc import Sequence

import numpy as np
import torch

from oper.base import native
from oper.base.errors import OperError
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan
from oper.runtime.comm.all_to_all import AllToAll
from oper.runtime.comm.node import Node
from oper.runtime.memory.heap import Heap
from oper.runtime.tables.buckets import TORCH_DTYPE, Bucket, EmbeddingTable
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_words


class TableIO:
    """The rows of a module's tables. Calls are collective where ranks do not share memory."""

    def __init__(
        self,
        plan: Plan,
        tables: Sequence[EmbeddingTable],
        buckets: Sequence[Bucket],
        heap: Heap,
        node: Node,
        exchange: AllToAll | None,
    ) -> None:
        self._plan, self._tables, self._buckets = plan, tables, buckets
        self._heap, self._node, self._exchange = heap, node, exchange
        self._maps: dict[int, AddressMap] = {}

    def read(
        self, requests: Sequence[tuple[int, int, int]], state: str | None
    ) -> list[torch.Tensor]:
        """Rows [first, first + count) of tables of the module by number, float32 [count, dim]; or
        a state of the optimizer, [count, dim] or [count]."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(requests)
        for bucket in self._buckets_with(state, [table for table, _, _ in requests]):
            mine = [n for n, (table, _, _) in enumerate(requests) if table in bucket.tables]
            addresses = [self._addresses(self._node.rank, *requests[n]) for n in mine]
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
                found[n] = part.clone()
        return found

    def write(self, entries: Sequence[tuple[int, int, torch.Tensor]], state: str | None) -> None:
        """Give all copies of rows [first, first + n) of tables new values, [n, dim] or [n]."""
        for bucket in self._buckets_with(state, [table for table, _, _ in entries]):
            mine = [entry for entry in entries if entry[0] in bucket.tables]
            values = [self._encoded(bucket, part, state) for _, _, part in mine]
            columns = values[0].shape[1] if values else self._columns(bucket, state)
            away: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
            for rank in range(self._node.ranks):
                slots_away: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
                values_away: list[torch.Tensor] = [self._empty(columns, state)]
                for (table, first, part), encoded in zip(mine, values, strict=True):
                    at = self._addresses(rank, table, first, len(part))
                    held = (at >> SLOT_BITS) == LOCAL
                    slots, rows = at[held] & SLOT_MASK, encoded[held]
                    if rank in self._node.peers:
                        self._put(bucket, rank, slots, rows, state)
                    else:
                        slots_away.append(slots)
                        values_away.append(rows)
                away.append((slots_away, values_away))
            if self._exchange is None:
                continue
            doing = "write tables"
            slots_in = self._exchange.send([torch.cat(s) for s, _ in away], doing)
            rows_in = self._exchange.send([torch.cat(v) for _, v in away], doing)
            for slots, rows in zip(slots_in, rows_in, strict=True):
                self._put(bucket, self._node.rank, slots, rows, state)

    def _buckets_with(self, state: str | None, tables: Sequence[int]) -> list[Bucket]:
        """The buckets that have a state; all where rows are meant. OperError where one of `tables`
        is in none of them."""
        # The same on all ranks, which exchange rows bucket by bucket, whatever each asks for.
        found = [b for b in self._buckets if state is None or state in b.states]
        if lacking := set(tables).difference(*(bucket.tables for bucket in found)):
            number = min(lacking)
            optimizer = self._tables[number].optimizer
            names = ", ".join(repr(part.name) for part in optimizer.states) or "none"
            raise OperError(
                f"table {self._plan.tables[self._tables[number].index].name!r}: state {state!r} of "
                f"its optimizer was asked for, and optimizer {optimizer.kind} has {names}; ask "
                "only for the states that a table's optimizer has"
            )
        return found

    def _addresses(self, rank: int, table: int, first: int, count: int) -> torch.Tensor:
        if rank not in self._maps:
            self._maps[rank] = AddressMap.of(self._plan, rank)
        ids = torch.arange(first, first + count)
        return self._maps[rank].translate(self._tables[table].index, ids)

    def _gather(self, bucket: Bucket, addresses: torch.Tensor, state: bool) -> torch.Tensor:
        """Values at addresses, float32 [n, dim], or the optimizer's [n, state values]."""
        arenas = {
            rank: (self._heap.state if state else self._heap.rows)(bucket.width, rank)
            for rank in self._node.peers
        }
        size = arenas[self._node.rank].shape[1]
        values = bucket.optimizer.state_bytes(bucket.dim) // 4 if state else bucket.dim
        bases = torch.zeros(len(self._heap.bases), self._node.ranks + 1, dtype=torch.int64)
        for rank, arena in arenas.items():
            bases[bucket.width, rank] = arena.data_ptr()
        buffer = self._fetch(addresses, arenas[self._node.rank], size)
        bases[bucket.width, self._node.ranks] = buffer.data_ptr()
        if not values or not len(addresses):
            return torch.empty(len(addresses), values)
        feature = np.zeros(1, FEATURE)
        feature["width"], feature["row_bytes"] = bucket.width, size
        feature["dtype"] = 0 if state else DTYPE_CODE[bucket.dtype]
        feature["dim"] = feature["out_stride"] = values
        feature["bags"] = len(addresses)
        elements = len(addresses) * values
        out = native.ops().pooled_rows(
            addresses, None, None, as_words(feature), bases, self._node.rank, elements,
            torch.float32,
        )  # fmt: skip
        return out.view(-1, values)

    def _fetch(self, addresses: torch.Tensor, own: torch.Tensor, size: int) -> torch.Tensor:
        """Rows of ranks that share no memory; the addresses are changed to read them here."""
        if self._exchange is None:
            return torch.empty(0, dtype=torch.uint8)
        field, asked, at = addresses >> SLOT_BITS, [], 0
        for rank in range(self._node.ranks):
            wanted = field == rank if rank not in self._node.peers else torch.zeros_like(field) > 0
            asked.append(addresses[wanted] & SLOT_MASK)
            addresses[wanted] = (self._node.ranks << SLOT_BITS) + torch.arange(
                at, at + len(asked[-1])
            )
            at += len(asked[-1])
        doing = "read tables"
        answers = [own[slots] for slots in self._exchange.send(asked, doing)]
        return torch.cat(self._exchange.send(answers, doing))

    def _encoded(self, bucket: Bucket, values: torch.Tensor, state: str | None) -> torch.Tensor:
        """Values as they are stored: [n, row bytes], or float32 [n, values] of a state."""
        if state is not None:
            return values.to(torch.float32).reshape(len(values), -1)
        if bucket.dtype == "int8":
            return native.ops().quantise_rows(values.to(torch.float32).contiguous())
        stored = values.to(TORCH_DTYPE[bucket.dtype]).contiguous()
        return stored.view(torch.uint8).reshape(len(values), -1)

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
        if state is None:
            self._heap.rows(bucket.width, rank)[slots] = rows
        else:
            part = bucket.optimizer.state_slices(bucket.dim)[state]
            self._heap.state(bucket.width, rank).view(torch.float32)[slots, part] = rows
