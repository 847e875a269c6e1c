"""The tier's rows of a batch by their addresses, which are the same on all ranks.

Address: bucket << 56 | rank whose shard has the row << 40 | slot. Sample comes after sample, as the
loader of a rank has them, and in a sample feature after feature: so the caches see the rows in the
order in which a simulation of the same log sees them.
"""

from typing import NamedTuple

import numpy as np
import torch

from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.memory.prepared_batch import PreparedBatch, SortedRows
from oper.runtime.tables.kernel_structs import FEATURE
from oper.scheduler.row_addresses import WIDTH_SHIFT, sample_major

_BUCKET = (FEATURE.names or ()).index("bucket")
_OWN_ROWS = LOCAL - 1  # fields from here on are the reader's own


class TierAccesses(NamedTuple):
    """The accesses of a batch that read the tier: which features and accesses they are, and in the
    batch's order their buckets and addresses there, [n] each."""

    features: torch.Tensor  # bool [F]
    chosen: torch.Tensor  # bool [N]
    buckets: torch.Tensor
    addresses: torch.Tensor


def tier_accesses(batch: PreparedBatch, rank: int, first_bucket: int) -> TierAccesses:
    """Those of the buckets from `first_bucket` on, which count from 0 in addresses."""
    of_feature = batch.features[:, _BUCKET] - first_bucket
    buckets = of_feature.repeat_interleave(batch.segment_offset.diff())
    chosen = buckets >= 0
    buckets, addresses = buckets[chosen], batch.addresses[chosen]
    owners = addresses >> SLOT_BITS
    owners = torch.where(owners >= _OWN_ROWS, rank, owners)
    full = buckets << WIDTH_SHIFT | owners << SLOT_BITS | addresses & SLOT_MASK
    return TierAccesses(of_feature >= 0, chosen, buckets, full)


def by_sample(batch: PreparedBatch, accesses: TierAccesses) -> tuple[torch.Tensor, torch.Tensor]:
    """The addresses sample after sample, and where each sample's begin and end, [samples + 1]."""
    of_tier = batch.lengths[accesses.features].numpy().astype(np.int64)
    order = torch.from_numpy(sample_major(of_tier))
    ends = torch.from_numpy(np.append(0, np.cumsum(of_tier.sum(axis=0))))
    return accesses.addresses[order], ends


def distinct_addresses(rows: SortedRows, bucket: int, first_bucket: int) -> np.ndarray:
    """The addresses of a bucket's distinct rows, in their order."""
    parts = []
    for owner in range(rows.ranks):
        slots = rows.slots[rows.range(first_bucket + bucket, owner)]
        parts.append(slots | owner << SLOT_BITS | bucket << WIDTH_SHIFT)
    found: np.ndarray = torch.cat(parts).numpy()
    return found
