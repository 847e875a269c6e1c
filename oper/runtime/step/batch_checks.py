"""Checks of a batch and of its gradients before anything is read or written by them.

All raise OperError, which names the feature and the place in it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from oper.base.errors import OperError
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.tables.features import Feature
from oper.runtime.tables.kernel_structs import FEATURE
from oper.tables.table import Table

_log = logging.getLogger(__name__)


def check_batch(batch: Any, weighted: bool, device: torch.device) -> None:
    """Check that a batch is a KeyedJaggedTensor on the device, with as many weights as values. Its
    lengths are checked when they are read (prepare_batch.py)."""
    if not hasattr(batch, "variable_stride_per_key"):
        raise OperError(
            "the batch: expected a KeyedJaggedTensor of TorchRec, got a "
            f"{type(batch).__name__}: convert it"
        )
    values = batch.values()
    if batch.variable_stride_per_key():
        raise OperError(
            "the batch has a different number of samples for each feature, which OPER does not "
            "support; give all features of a KeyedJaggedTensor the same"
        )
    if getattr(batch, "inverse_indices_or_none", lambda: None)() is not None:
        raise OperError(
            "the batch: expected no inverse_indices, got some: expand the samples before the "
            "lookup, or index its output by them after it"
        )
    if values.device != device or values.dtype not in (torch.int32, torch.int64):
        raise OperError(
            f"the batch's values: expected ids, int32 or int64, on {device}, the tables' device, "
            f"got {values.dtype} on {values.device}: convert them, or put the batch there"
        )
    if values.dim() != 1:
        raise OperError(
            f"the batch's values: expected one dimension, got shape {list(values.shape)}: flatten "
            "them, because lengths say which bag each is of"
        )
    if not weighted:
        return
    weights = batch.weights_or_none()
    if weights is None:
        raise OperError("the collection is weighted, and the batch has no weights")
    if weights.shape != values.shape:
        raise OperError(
            f"the batch's weights: expected one for each of {values.numel():,} values, got shape "
            f"{list(weights.shape)}: give as many weights as ids"
        )


def segment_offset(batch: Any) -> torch.Tensor:
    """Return the places at which a batch's features begin, int64 [F + 1], on the device of its
    values."""
    if batch.stride() == 0:
        return batch.values().new_zeros(len(batch.keys()) + 1, dtype=torch.int64)
    begins: torch.Tensor = batch.offsets()[:: batch.stride()].to(torch.int64).contiguous()
    return begins


def check_offsets(batch: Any) -> None:
    """Check a batch's offsets against its values, because the kernels rely on them."""
    keys, values, offsets = batch.keys(), batch.values(), batch.offsets()
    bags = batch.stride() * len(keys)
    if offsets.numel() != bags + 1:
        raise OperError(
            f"the batch has {offsets.numel() - 1:,} lengths, and {len(keys)} features of "
            f"{batch.stride():,} samples need {bags:,}"
        )
    if (offsets[1:] < offsets[:-1]).any():
        bag = int((offsets[1:] < offsets[:-1]).nonzero()[0])
        feature, sample = divmod(bag, batch.stride())
        raise OperError(
            f"feature {keys[feature]!r}: the length of sample {sample} is "
            f"{int(offsets[bag + 1] - offsets[bag])}; offsets must ascend"
        )
    if int(offsets[0]) or int(offsets[-1]) != values.numel():
        raise OperError(
            f"the batch's lengths say that values {int(offsets[0]):,} to {int(offsets[-1]):,} are "
            f"in use, and there are {values.numel():,}: the lengths must sum to that"
        )


def replace_bad_ids(
    values: torch.Tensor,
    segment_offset: torch.Tensor,
    lookups: Sequence[tuple[Feature, Table]],
    rank: int,
    bounds: str,
) -> torch.Tensor:
    """Return values [N] with row 0 in the place of ids that are out of range, unless those are
    fatal."""
    replaced = values.clone()
    first = segment_offset.tolist()
    for n, (feature, table) in enumerate(lookups):
        ids = replaced[first[n] : first[n + 1]]
        bad = (ids < 0) | (ids >= table.rows)
        if not bad.any():
            continue
        at = int(bad.nonzero()[0])
        text = (
            f"feature {feature.name!r}: id {int(ids[at])}, number {at} of the feature on rank "
            f"{rank}, is none of the rows 0 to {table.rows - 1:,} of table {table.name!r}"
        )
        if bounds == "fatal":
            raise OperError(
                f"{text}; map raw values to rows by the rule the plan was profiled with, or "
                "set bounds to 'warning' or 'ignore' to read row 0"
            )
        if bounds == "warning":
            _log.warning("%s; %d of the feature's ids here read row 0", text, int(bad.sum()))
        ids[bad] = 0
    return replaced


def check_finite(
    batch: PreparedBatch, grad: torch.Tensor, lookups: Sequence[Feature], where: str
) -> None:
    """Check that all of a flat gradient of a batch's output is finite; `where` completes the
    error."""
    if torch.isfinite(grad).all():
        return
    for feature in batch.own_features.numpy().view(FEATURE)[:, 0]:
        shape, stride = (feature["bags"], feature["dim"]), (feature["out_stride"], 1)
        finite = torch.isfinite(grad.as_strided(shape, stride, feature["out_base"])).all(dim=1)
        if not finite.all():
            bag = int((~finite).nonzero()[0])
            raise OperError(
                f"feature {lookups[feature['lookup']].name!r}: the gradient of its output row "
                f"{bag} is not finite ({where})"
            )
