"""What torch.compile must know of torch.ops.oper.sort_accesses: the shapes of what it returns.

How many accesses a batch sorts and how many rows they read is known only from its data.
"""

import torch

from oper import native

native.ops()  # which defines the operator


@torch.library.register_fake("oper::sort_accesses")
def _sorted_shapes(
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    features: torch.Tensor,
    rank: int,
    ranks: int,
    buckets: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    context = torch.library.get_ctx()
    accesses, runs = context.new_dynamic_size(), context.new_dynamic_size()
    positions = addresses.new_empty(accesses, dtype=torch.int32)
    run_start = addresses.new_empty(runs + 1, dtype=torch.int32)
    run_count = addresses.new_empty(buckets * (ranks + 1) + 1)
    return positions, run_start, addresses.new_empty(runs), run_count
