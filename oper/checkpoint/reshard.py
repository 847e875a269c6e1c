"""`oper checkpoint reshard`: a checkpoint rewritten for another number of ranks.

Loading works without it: ranks read the rows that they need from any checkpoint. It is for readers
that want a file for each rank; it gives a checkpoint by torch alone a marker, so that it can be
verified; and it merges the links of a delta. Rows are copied in pieces, and everything outside the
tables unchanged.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oper.base.errors import OperError
from oper.checkpoint.chain import Chain, check_replaceable
from oper.checkpoint.marker import FORMAT, Marker
from oper.checkpoint.row_blocks import row_blocks
from oper.checkpoint.saved_index import INDEX, Extent, SavedIndex, SavedTensor, Shard
from oper.checkpoint.saved_tables import pieces
from oper.checkpoint.shard_file import SUFFIX, ShardFile, check_records, new_save, open_part
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.torch_index import write_torch_index
from oper.files.manifest import describe_file
from oper.files.storage import atomic_folder

_COPIED_BYTES = 1 << 24  # at a time
Advance = Callable[[float], None]


def reshard(
    checkpoint: Chain | Path | str,
    output: Path | str,
    ranks: int,
    overwrite: bool = False,
    advance: Advance = lambda amount: None,
) -> Path:
    """Write a checkpoint, or the newest in a folder of checkpoints, for `ranks` ranks to the folder
    `output`, and return that folder. A delta becomes a whole checkpoint. Call `advance` with the
    number of bytes of values copied.

    Raise OperError if the checkpoint is damaged, or `output` may not be replaced or written.
    """
    if ranks < 1:
        raise OperError(f"ranks: expected at least 1, got {ranks}")
    chain = open_chain(checkpoint)
    check_replaceable(output)
    index, marker = chain.index, chain.marker
    shards: dict[str, list[Shard]] = {name: [] for name in index.tensors}
    objects: dict[str, Extent] = {}
    files, save = {}, new_save()
    with atomic_folder(output, FORMAT, overwrite) as made:
        for rank in range(ranks):
            name = f"__{rank}_0{SUFFIX}"
            file = ShardFile(made / name)
            try:
                for tensor in index.tensors.values():
                    if tensor.name in chain.table_of_tensor:
                        block = row_blocks(tensor.shape[0], ranks)[rank]
                        written = _write_rows(chain, tensor, block, file, name, advance)
                        shards[tensor.name] += written
                    elif rank == 0:
                        for shard in tensor.shards:
                            place = _copied(chain.folder, shard.extent, file, name)
                            shards[tensor.name].append(replace(shard, extent=place))
                        advance(tensor.bytes)
                if rank == 0:
                    for key, extent in index.objects.items():
                        objects[key] = _copied(chain.folder, extent, file, name)
                files[name] = file.close(save)
            finally:
                file.abandon()
        tensors = {key: replace(t, shards=tuple(shards[key])) for key, t in index.tensors.items()}
        write_torch_index(made, SavedIndex(tensors, objects, index.paths))
        files[INDEX] = describe_file(made / INDEX)
        known = marker or Marker(None, None, ranks, {})  # for a checkpoint that torch alone wrote
        replace(known, ranks=ranks, files=files, delta=None, save=save).write(made)
    return Path(output)


def _write_rows(
    chain: Chain,
    tensor: SavedTensor,
    block: tuple[int, int],
    file: ShardFile,
    name: str,
    advance: Advance,
) -> list[Shard]:
    """Add a rank's rows of a tensor to its file."""
    written = []
    for first, rows in pieces(tensor.row_bytes, *block):
        place = file.add(chain.read_rows(tensor.name, first, rows))
        offsets = (first, *(0 for _ in tensor.shape[1:]))
        written.append(Shard(offsets, (rows, *tensor.shape[1:]), Extent(name, *place)))
        advance(rows * tensor.row_bytes)
    return written


def _copied(folder: Path, extent: Extent, file: ShardFile, name: str) -> Extent:
    """Append a part of the old checkpoint to a file, unchanged."""
    check_records(folder, extent)
    start = file.bytes
    with open_part(folder, extent) as part:
        while block := part.read(_COPIED_BYTES):
            file.write(block)
    return Extent(name, start, file.bytes - start)
