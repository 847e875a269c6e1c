"""How the values of a batch are divided into features and bags.

Both functions check a KeyedJaggedTensor's lengths, bring its keys into `order` where that is not
None, and return it with whether each bag holds one id, and where each feature begins: int64
[F + 1] in the host's memory. OperError where lengths and values do not fit.
"""

from collections.abc import Sequence
from typing import Any

import torch

from oper.base import native
from oper.runtime.step.batch_checks import check_offsets

Divided = tuple[Any, bool, torch.Tensor]


def bags_on_host(batch: Any, order: Sequence[int] | None) -> Divided:
    """Of a batch whose values the host can read."""
    one_each = _has_one_id_each(batch)
    if not one_each:
        check_offsets(batch)
    if order is not None:
        batch = batch.permute(order)
        one_each = one_each or _has_one_id_each(batch)
    samples, features = int(batch.stride()), len(batch.keys())
    if one_each:
        return batch, True, torch.arange(features + 1) * samples
    return batch, False, batch.offsets()[::samples].to(torch.int64).contiguous()


def bags_on_device(batch: Any, order: Sequence[int] | None) -> Divided:
    """Of a batch on a device, by one read of it: all that the host must know comes together."""
    samples, features = int(batch.stride()), len(batch.keys())
    offsets = batch.offsets()
    if samples * features == 0 or offsets.numel() != samples * features + 1:
        check_offsets(batch)
        first = torch.zeros(features + 1, dtype=torch.int64)
        one_each = True
    else:
        lengths = offsets.diff()
        found = torch.cat([offsets[::samples], torch.stack(torch.aminmax(lengths))])
        *begins, least, most = found.tolist()
        if least < 0 or begins[0] or begins[-1] != batch.values().numel():
            check_offsets(batch)
        first, one_each = torch.tensor(begins), least == most == 1
    if order is not None:
        batch = batch.permute(order)
        lengths = first.diff()[list(order)]
        first = torch.cat([first.new_zeros(1), lengths.cumsum(0)])
    return batch, one_each, first


def _has_one_id_each(batch: Any) -> bool:
    """Lengths are looked at where there are no offsets yet, which need not be computed then."""
    bags = batch.stride() * len(batch.keys())
    if batch.values().numel() != bags:
        return False
    lengths = batch.lengths_or_none()
    if batch.offsets_or_none() is None and lengths.numel() == bags > 0:
        least, most = lengths.aminmax()
        return int(least) == int(most) == 1
    offsets = batch.offsets().contiguous()
    one_each: bool = offsets.numel() == bags + 1 and native.ops().one_per_bag(offsets)
    return one_each
