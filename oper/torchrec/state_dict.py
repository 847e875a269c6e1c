"""Tables in TorchRec's state dicts: contiguous blocks of rows, one per rank.

A table of n rows on M ranks has its rows [r·b, (r + 1)·b), b = ⌈n / M⌉, in a ShardedTensor's shard
on rank r, under any plan, like in TorchRec's row-wise sharding. (Shards that follow the plan's runs
of rows would be correct too, but a thousand times slower to save.) Ranks beyond the last row have
empty blocks, without which TorchRec cannot load them.

Blocks lie in the host's memory, also for ranks on devices, with placements `rank:N/cpu`: a copy on
the device would double the memory of the rank's share of the tables, which no plan accounts for.

Blocks are copies, unlike TorchRec's, and torch.distributed.checkpoint loads in place. So blocks
that were handed out are kept until the next use of the tables, when changed ones are written back.
The same holds for the number of Adam's steps, one for all tables of an engine.
"""

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from oper.base.errors import OperError
from oper.checkpoint.row_blocks import row_blocks
from oper.runtime.comm.group import Group
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.initial_values import planned_tables
from oper.runtime.table_io import RowBlock, RowRange
from oper.runtime.tables.optimizer_buckets import TORCH_DTYPE
from oper.runtime.tables.optimizers import State
from oper.tables.table import Table
from oper.torchrec.objects_of_ranks import gathered
from oper.torchrec.streamed_table import StreamedTable, TableRows
from oper.torchrec.touched_table import TouchedBlock, TouchedTable

_log = logging.getLogger(__name__)

STEPS = "iter"  # name of Adam's number of steps among the names of an optimizer's states
_SECOND_MOMENT = "exp_avg_sq"  # the state that only Adam has


@dataclass
class _HandedOut:
    """Block that a state dict holds: rows of a table or of its optimizer's state, or STEPS."""

    table: int
    state: str | None
    first: int
    values: torch.Tensor
    version: int  # of `values` when they equalled the tables


class TableBlocks:
    """Tables of one engine in blocks. All ranks make all calls."""

    def __init__(self, engine: EmbeddingEngine, group: dist.ProcessGroup | None) -> None:
        self._engine, self._group = engine, group
        self._tables = planned_tables(engine)
        self._streams = False
        self._touched: list[TouchedBlock] | None = None
        self._handed_out: list[_HandedOut] = []
        self._warned_of_steps = False
        # Forgotten blocks that may still be referenced: reference, version, table.
        self._forgotten: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        # The reference is weak, so that the engine is freed together with this object, not at a
        # garbage collection.
        write_back = weakref.WeakMethod(self.write_back)

        def before_use() -> None:
            if method := write_back():
                method()

        engine.before_use = before_use

    @property
    def group(self) -> Group | None:
        """Group of the ranks that have blocks, with the engine's deadline for waits; None for a
        single rank."""
        return self._engine.node.group

    @property
    def tables(self) -> Sequence[Table]:
        """Tables of the plan."""
        return self._tables

    @contextmanager
    def streaming(self, touched: list[TouchedBlock] | None = None) -> Iterator[None]:
        """Make state dicts inside the context have a StreamedTable in the place of each copy of a
        table; or a TouchedTable, given the `touched` rows of each table. Ranks enter together;
        inside, each makes state dicts by itself."""
        self._write_changed()
        self._streams, self._touched = True, touched
        try:
            yield
        finally:
            self._streams, self._touched = False, None

    def touched(self) -> list[TouchedBlock]:
        """Return the touched rows of each table in this rank's blocks."""
        self._write_changed()
        engine = self._engine
        blocks = [
            TouchedBlock.of(engine, number, row_blocks(table.rows, engine.ranks))
            for number, table in enumerate(self._tables)
        ]
        rows = gathered([sum(block.counts) for block in blocks], self.group)
        by_table = zip(blocks, zip(*rows, strict=True), strict=True)
        return [block.among(of_ranks, engine.rank) for block, of_ranks in by_table]

    @torch.inference_mode(mode=False)  # versions reveal changes to the handed-out blocks
    def read(self, tables: Sequence[int], state: State | None = None) -> list[Any]:
        """Return copies of tables, or of a state of their optimizer: ShardedTensors [rows, dim] or
        [rows]; plain tensors without a process group; inside `streaming`, its stand-ins."""
        name = state.name if state else None
        if self._streams:
            return [self._streamed(table, state) for table in tables]
        if any(block.table in tables and block.state == name for block in self._handed_out):
            self._write_changed()
        requests = [RowRange(table, *self._block(table)) for table in tables]
        blocks = self._engine.read_rows(requests, name)
        copies = []
        for (table, first, _), block in zip(requests, blocks, strict=True):
            planned = self._tables[table]
            dtype = torch.float32 if state else TORCH_DTYPE.get(planned.dtype, torch.float32)
            values = block.to(dtype)
            self._handed_out.append(_HandedOut(table, name, first, values, values._version))
            copies.append(self._sharded(planned.rows, values))
        return copies

    def write(self, values: Mapping[int, Any], state: State | None = None) -> None:
        """Give tables new values: ShardedTensors or DTensors sharded by rows in any way, of which
        each rank writes its shards, or whole tensors, of which each rank writes its block.
        StreamedTables are written already. Raise OperError on all ranks if one has values of
        another size."""
        self._warn_of_missing_steps()
        name = state.name if state else None
        blocks, problem = [], ""
        try:
            for table, value in values.items():
                if not isinstance(value, TableRows):
                    parts = self._parts(table, value, state)
                    blocks += [RowBlock(table, first, part) for first, part in parts]
        except OperError as error:
            problem = str(error)
        self._engine.node.check_all(problem, "load values")
        self.replaced(values, name)
        self._engine.write_rows(blocks, name)

    def agree_on(self, tables: Iterable[int]) -> None:
        """Raise OperError on all ranks if they would load different tables, after which rows would
        be new on some ranks and old on others."""
        names = {f"table {self._tables[table].name!r}": "given" for table in tables}
        self._engine.node.agree_on(names, "the tables of a state dict")

    def agree(self, function: str, given: Mapping[str, Any]) -> None:
        """Raise OperError on all ranks unless their arguments of a function, by name, are equal."""
        arguments = {name: repr(value) for name, value in given.items()}
        self._engine.node.agree_on(arguments, f"the arguments of {function}")

    @torch.inference_mode(mode=False)
    def read_steps(self, table: int) -> torch.Tensor:
        """Return a copy of the optimizer's number of steps, [1], as a state of a table."""
        if self._streams:
            return torch.tensor([self._engine.optimizer_steps])
        if any(block.table == table and block.state == STEPS for block in self._handed_out):
            self._write_changed()
        values = torch.tensor([self._engine.optimizer_steps])
        self._handed_out.append(_HandedOut(table, STEPS, 0, values, values._version))
        return values

    def write_steps(self, value: torch.Tensor | int) -> None:
        """Set the number of steps of the optimizer."""
        self.replaced(range(len(self._tables)), STEPS)
        self._engine.optimizer_steps = int(value)

    def replaced(self, tables: Collection[int], state: str | None = None) -> None:
        """Drop changes to handed-out blocks of tables, because the tables now get other values."""
        self._handed_out = [
            block for block in self._handed_out if block.table not in tables or block.state != state
        ]

    def write_back(self) -> None:
        """Write changed handed-out blocks to the tables, and forget all blocks. Call it before the
        tables are used.

        On ranks that serve, which do not wait for each other, a changed block is an error.
        """
        if self._forgotten:
            self._warn_of_late_writes()
        if self._handed_out:
            if self._engine.training:
                self._write_changed()
            elif changed := self._changed():
                raise OperError(
                    f"table {self._tables[changed[0].table].name!r}: a state dict of a model for "
                    "inference was written to; pass it to load_state_dict, on all ranks"
                )
            self._forgotten += [
                (weakref.ref(block.values), block.version, block.table)
                for block in self._handed_out
            ]
            self._handed_out = []

    def _warn_of_late_writes(self) -> None:
        alive = []
        for reference, version, table in self._forgotten:
            values = reference()
            if values is not None and values._version != version:
                _log.warning(
                    "table %r: a state dict was written to after the tables had been used, which "
                    "has no effect; pass it to load_state_dict, or take it just before it is "
                    "written to",
                    self._tables[table].name,
                )
            elif values is not None:
                alive.append((reference, version, table))
        self._forgotten = alive

    def _write_changed(self) -> None:
        self._warn_of_missing_steps()
        # Every state that was handed out is written, changed or not: all ranks write together, and
        # may have changed different blocks.
        for name in dict.fromkeys(block.state for block in self._handed_out):
            changed = [block for block in self._changed() if block.state == name]
            if name != STEPS:
                rows = [RowBlock(b.table, b.first, b.values) for b in changed]
                self._engine.write_rows(rows, name)
            elif changed:
                self._engine.optimizer_steps = int(changed[-1].values)
            for block in changed:
                block.version = block.values._version

    def _warn_of_missing_steps(self) -> None:
        """Warn once that Adam's moments were loaded in place but not its number of steps, for
        example from a checkpoint of TorchRec."""
        changed = self._changed()
        steps = any(block.state == STEPS for block in changed)
        for block in changed:
            if block.state == _SECOND_MOMENT and not steps and not self._warned_of_steps:
                self._warned_of_steps = True
                _log.warning(
                    "table %r: Adam's moments were loaded, and not the number of steps (%s.%s), "
                    "which stays %d: the first steps will be of another size. Checkpoints of "
                    "TorchRec's lack it; set it by set_optimizer_step of the model's "
                    "fused_optimizer",
                    self._tables[block.table].name,
                    self._tables[block.table].name,
                    STEPS,
                    self._engine.optimizer_steps,
                )

    def _changed(self) -> list[_HandedOut]:
        return [block for block in self._handed_out if block.values._version != block.version]

    def _block(self, table: int) -> tuple[int, int]:
        """Return the first row and the number of rows of this rank's block of a table."""
        return row_blocks(self._tables[table].rows, self._engine.ranks)[self._engine.rank]

    def _streamed(self, table: int, state: State | None) -> TableRows:
        if self._touched is not None:
            return TouchedTable(self._engine, table, state, self._touched[table])
        blocks = row_blocks(self._tables[table].rows, self._engine.ranks)
        return StreamedTable(self._engine, table, state, blocks)

    def _sharded(self, rows: int, block: torch.Tensor) -> ShardedTensor | torch.Tensor:
        if self._group is None:
            return block
        tail = list(block.shape[1:])
        shards = [
            ShardMetadata(
                [first] + [0] * len(tail),
                [count, *tail],
                f"rank:{dist.get_global_rank(self._group, rank)}/cpu",
            )
            for rank, (first, count) in enumerate(row_blocks(rows, self._engine.ranks))
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(block, shards[self._engine.rank])],
            ShardedTensorMetadata(
                shards, torch.Size([rows, *tail]), TensorProperties(dtype=block.dtype)
            ),
            process_group=self._group,
        )

    def _parts(self, table: int, value: Any, state: State | None) -> list[tuple[int, torch.Tensor]]:
        """Return the parts of a value that this rank writes: first rows, and the values from there
        on."""
        planned = self._tables[table]
        whole = (planned.rows,) if state and state.rowwise else (planned.rows, planned.dim)
        size = _size(value)
        if size != whole:
            what = f"{state.name} of its optimizer" if state else "weight"
            raise OperError(
                f"table {planned.name!r}: the state dict's {what}: expected shape {whole}, got "
                f"{size}: load a state dict of the same model"
            )
        parts = _local_parts(value)
        if parts is None:
            if value.is_meta or value.layout is not torch.strided:
                kind = "on the meta device" if value.is_meta else f"of {value.layout}"
                raise OperError(
                    f"table {planned.name!r}: expected a dense tensor with values in the state "
                    f"dict, got one {kind}: give one on the CPU or a device"
                )
            first, count = self._block(table)
            parts = [((first, 0), value.detach()[first : first + count])]
        for offset, part in parts:
            if part.shape[1:] != whole[1:] or any(offset[1:]):
                raise OperError(
                    f"table {planned.name!r}: the state dict holds it in shards of columns, which "
                    "cannot be loaded directly; save it with torch.distributed.checkpoint and load "
                    "that into this model's state dict"
                )
        return [(offset[0], part.detach()) for offset, part in parts if len(part)]


def _size(value: Any) -> Any:
    """Return the size of a tensor of any kind; the name of the type of any other value."""
    if isinstance(value, ShardedTensor):
        return tuple(value.metadata().size)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _local_parts(value: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]] | None:
    """Return this rank's shards of a distributed tensor with their offsets; None for a plain
    tensor."""
    if isinstance(value, ShardedTensor):
        return [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
    if not isinstance(value, DTensor):
        return None
    local = value.to_local()
    if isinstance(local, LocalShardsWrapper):
        return list(zip(local.local_offsets(), local.local_shards(), strict=True))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return [(offset, local)]
