"""Blocks of a table's rows by rank in a checkpoint, equal to TorchRec's row-wise sharding."""


def row_blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each rank's block; both are 0 beyond the last
    row."""
    block = -(-rows // ranks)
    firsts = [min(block * rank, rows) for rank in range(ranks)]
    return [(first, min(block, rows - first)) for first in firsts]
