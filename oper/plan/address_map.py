"""Address map of one rank, row id -> address: the interface of planner and runtime (§5.1).

An address is (field << 40) | slot, int64 and non-negative: field is the rank that holds the row, or
LOCAL for the reader's own copy; slot indexes that rank's arena of the row's width. `AddressMap`
computes it from a bitmap, a code or a second bit for each listed row, and arithmetic, at about one
bit per cold row. The tables that `flattened` selects use an array of 8 bytes per row, which is
faster.
"""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor, struct_words
from oper.base.errors import OperError, check_type
from oper.base.units import whole_number
from oper.plan.bitmap import listed_before
from oper.plan.layout import (
    LOCAL,
    SLOT_BITS,
    SLOT_MASK,
    Layout,
    RankMap,
    copies_map,
    occurrences,
    rank_map,
)
from oper.plan.plan import Plan, load_rank_map
from oper.tables.table import Table, index_of

__all__ = ["LOCAL", "AddressMap", "unpack"]

# Records that the kernel reads for each table and for each step of a pattern of ranks, explained in
# csrc/include/oper/plan/translate.h.
TABLE_MAP = native.shared(
    "struct TableMap",
    np.dtype(
        [
            ("rows", np.int64),
            ("first_line", np.int64),
            ("origin", np.int64),
            ("period", np.int64),
            ("reciprocal", np.uint64),
            ("pattern", np.int64),
            ("stripe_base", np.int64),
            ("flat", np.int64),
            ("everywhere", np.int64),
        ]
    ),
)
PATTERN_STEP = native.shared(
    "struct PatternStep",
    np.dtype([("owner", np.uint16), ("before", np.uint16), ("copies", np.uint32)]),
)
_NO_FLAT = -1  # for a table without plain addresses


def unpack(addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fields (ranks, or LOCAL) and slots of addresses."""
    return addresses >> SLOT_BITS, addresses & SLOT_MASK


class AddressMap:
    """The compact map of one rank. Its large arrays are the layout's, shared by all ranks."""

    def __init__(self, tables: Sequence[Table], layout: Layout, rank: RankMap) -> None:
        self.tables = tuple(tables)
        self.rank = rank.rank
        orders = [_at_least_two(order) for order in layout.orders]
        period = np.array([len(order) for order in orders], dtype=np.int64)
        frozen = layout.stripe_bitmap
        numbering = layout.bitmap if frozen is None else frozen
        reciprocal = np.array([-(-(1 << 64) // int(p)) for p in period], dtype=np.uint64)
        maps = np.zeros(len(layout.rows), dtype=TABLE_MAP)
        maps["rows"] = layout.rows
        maps["first_line"] = layout.line_offset[:-1]
        maps["origin"] = layout.rotation + listed_before(numbering, layout.line_offset[:-1])
        maps["period"] = period[layout.pattern_of]
        maps["reciprocal"] = reciprocal[layout.pattern_of]
        maps["pattern"] = (np.cumsum(period) - period)[layout.pattern_of]
        maps["stripe_base"] = np.arange(len(layout.rows)) * layout.ranks
        maps["flat"] = _NO_FLAT
        everywhere = layout.everywhere_bitmap
        if layout.everywhere_group is not None and layout.everywhere_first is not None:
            # Harmless in tables without such rows, whose group is -1.
            first = rank.group_base[layout.everywhere_group] + layout.everywhere_first
            maps["everywhere"] = first - layout.everywhere_offset[:-1]
        steps = np.concatenate([_pattern_steps(order, layout.ranks) for order in orders])
        self._maps, self._flat = struct_words(maps), torch.empty(0, dtype=torch.int64)
        self._flat_first: Ints = maps["flat"]
        self._arguments: tuple[torch.Tensor | int | None, ...] = (
            as_tensor(layout.bitmap.view(np.int64)),
            None if frozen is None else as_tensor(frozen.view(np.int64)),
            None if everywhere is None else as_tensor(everywhere.view(np.int64)),
            as_tensor(layout.codes.view(np.int32 if layout.codes.itemsize == 4 else np.int64)),
            layout.group_bits,
            as_int64(rank.group_base),
            as_int64(rank.stripe_base - layout.stripe_lead),
            struct_words(steps),
        )

    @classmethod
    def of(cls, plan: Plan, rank: int) -> "AddressMap":
        """Return the map of one rank of a plan; `load` takes its folder."""
        check_type("AddressMap.of", "plan", plan, Plan)
        _check_rank(rank, plan.ranks)
        return cls(plan.tables, plan.layout, rank_map(plan.layout, rank))

    @classmethod
    def of_copies(cls, plan: Plan, rank: int) -> "AddressMap":
        """Return the map of one rank's copies: LOCAL for every row that it holds, even if it reads
        another rank's copy."""
        _check_rank(rank, plan.ranks)
        return cls(plan.tables, plan.layout, copies_map(plan.layout, rank_map(plan.layout, rank)))

    @classmethod
    def load(cls, folder: Path | str, rank: int) -> "AddressMap":
        """Return the map of one rank, from its file in a plan's folder; shared arrays
        memory-mapped."""
        plan = Plan.load(folder)
        _check_rank(rank, plan.ranks)
        loaded, stated = load_rank_map(folder, rank, plan.layout), rank_map(plan.layout, rank)
        for name in ("group_base", "stripe_base"):
            if not np.array_equal(getattr(loaded, name), getattr(stated, name)):
                raise OperError(
                    f"{folder}: the {name} of rank {rank}'s map is not that of the layout; see "
                    "`oper plan check`, and make the plan again"
                )
        return cls(plan.tables, plan.layout, stated)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, shared ones included."""
        arrays = (self._maps, *self._arguments, self._flat)
        return sum(a.nbytes for a in arrays if isinstance(a, torch.Tensor))

    def flattened(self, most_bytes: int | None = None) -> "AddressMap":
        """Return this map with arrays of addresses for its smallest tables: as many as fit in
        `most_bytes`, or all."""
        rows = np.array([table.rows for table in self.tables], dtype=np.int64)
        smallest = np.argsort(rows, kind="stable")
        if most_bytes is not None:
            smallest = smallest[8 * np.cumsum(rows[smallest]) <= most_bytes]
        maps = self._maps.numpy().copy().view(TABLE_MAP)[:, 0]
        maps["flat"] = _NO_FLAT
        maps["flat"][smallest] = np.cumsum(rows[smallest]) - rows[smallest]
        addresses = [self.translate(int(n), torch.arange(rows[n])) for n in smallest]
        flat = copy(self)
        flat._maps, flat._flat_first = struct_words(maps), maps["flat"]
        flat._flat = torch.cat([torch.empty(0, dtype=torch.int64), *addresses])
        return flat

    @property
    def flat_tables(self) -> Ints:
        """The tables whose addresses are looked up in an array."""
        return np.flatnonzero(self._flat_first != _NO_FLAT)

    def follow(self, table: int, ids: torch.Tensor, addresses: torch.Tensor) -> None:
        """Set the addresses of rows of one of the `flat_tables`, int64 [n] each. Rows of other
        tables follow their codes (`follow_codes`)."""
        at = (int(self._flat_first[table]) + ids).to(self._flat.device)
        self._flat[at] = addresses.to(self._flat.device)

    def follow_codes(self, index: Ints, codes: NDArray[Any]) -> None:
        """Set the layout's codes at `index`, [n] each. A map in the host's memory reads the
        layout's own codes."""
        held = self._arguments[3]
        assert isinstance(held, torch.Tensor)
        new_codes = as_tensor(codes.view(np.int32 if codes.itemsize == 4 else np.int64))
        held[as_int64(index).to(held.device)] = new_codes.to(held.device)

    def to(self, device: torch.device) -> "AddressMap":
        """Return this map for ids on a device; the object itself if it is there already."""
        if self._maps.device == device:
            return self
        moved = copy(self)
        moved._maps, moved._flat = self._maps.to(device), self._flat.to(device)
        moved._arguments = tuple(
            argument.to(device) if isinstance(argument, torch.Tensor) else argument
            for argument in self._arguments
        )
        return moved

    def translate(self, table: int | str, ids: torch.Tensor | ArrayLike) -> torch.Tensor:
        """Return the addresses of rows of one table, given by number or name: int64, in the shape
        of `ids`.

        Ids are integers of any shape: a tensor, int64 or int32, or a list or array. Raise
        OperError, naming the table and the id, if an id is not a row of the table.
        """
        if not isinstance(ids, torch.Tensor):
            ids = _as_ids(ids)
        if isinstance(table, str):
            number = index_of(self.tables, table, "the address map")
        else:
            number = whole_number(table, "table")
        return self.translate_features(ids, torch.tensor([0, ids.numel()]), torch.tensor([number]))

    def translate_features(
        self,
        values: torch.Tensor,
        feature_offsets: torch.Tensor,
        feature_tables: torch.Tensor,
        *,
        ops: Any = None,
        stream: int = 0,
        report: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return addresses of a batch of features, given as the values of a KeyedJaggedTensor [N].

        Values feature_offsets[f] … feature_offsets[f + 1] - 1 are rows of table feature_tables[f];
        both are int64, [F + 1] and [F], in the host's memory. For ids on a device, `ops` are its
        operators, and `stream` the stream to start on. With a `report` (late_checks.py) offsets and
        tables are on the device too, the call does not wait, and ids out of range get row 0.
        """
        values = values.contiguous()
        try:
            return (ops or native.ops()).translate(
                values, feature_offsets, feature_tables, self._maps, *self._arguments, self._flat,
                stream, report,
            )  # fmt: skip
        except IndexError as error:
            raise self._explained(values.flatten(), feature_offsets, feature_tables) from error

    def _explained(
        self, values: torch.Tensor, segment_offset: torch.Tensor, segment_table: torch.Tensor
    ) -> OperError:
        """Return the error that names the id and the table."""
        for segment, index in enumerate(segment_table.tolist()):
            if not 0 <= index < len(self.tables):
                break
            table = self.tables[index]
            begin, end = segment_offset[segment : segment + 2].tolist()
            ids = values[begin:end]
            bad = ((ids < 0) | (ids >= table.rows)).nonzero()
            if len(bad):
                at = int(bad[0])
                return OperError(
                    f"table {table.name!r}: id {int(ids[at])} (number {begin + at} of the batch), "
                    f"and it has rows 0 to {table.rows - 1}; map raw values to rows by the rule "
                    "the plan was profiled with"
                )
        return OperError(
            f"tables {segment_table.tolist()}: the plan has tables 0 to {len(self.tables) - 1}"
        )


def _as_ids(ids: ArrayLike) -> torch.Tensor:
    """Return a list or array of integers as a tensor."""
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or (array > np.iinfo(np.int64).max).any():
        raise OperError(f"ids: expected integers that fit int64, got {array.dtype}")
    return torch.from_numpy(array.astype(np.int64))


def _at_least_two(order: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return `order`, written twice if its period is one step: 2^64 / 1 would overflow the kernel's
    reciprocal."""
    return np.repeat(order, 2) if len(order) == 1 else order


def _pattern_steps(order: NDArray[np.uint16], ranks: int) -> NDArray[Any]:
    """Return the PATTERN_STEP of each position of a pattern."""
    before, copies = occurrences(order.astype(np.int64), ranks)
    steps = np.zeros(len(order), dtype=PATTERN_STEP)
    steps["owner"], steps["before"], steps["copies"] = order, before, copies[order]
    return steps


def _check_rank(rank: int, ranks: int) -> None:
    whole_number(rank, "rank")
    if not 0 <= rank < ranks:
        raise OperError(f"rank {rank}: the plan has ranks 0 to {ranks - 1}")
