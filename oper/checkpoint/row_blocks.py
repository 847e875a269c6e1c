"""Which rows of a table each rank has in a checkpoint: as in TorchRec's row-wise sharding."""


def row_blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """First row and number of rows of each rank's block, which are 0 beyond the last row."""
    each = -(-rows // ranks)
    firsts = [min(each * rank, rows) for rank in range(ranks)]
    return [(first, min(each, rows - first)) for first in firsts]
