"""A KeyedJaggedTensor's interface, as far as engines use it, where TorchRec is not installed."""

from collections.abc import Sequence

import torch


class PlainBatch:
    """The arguments are those of a KeyedJaggedTensor."""

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        stride: int,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        length_per_key: list[int] | None = None,
    ) -> None:
        self._keys, self._values, self._weights = list(keys), values, weights
        self._stride, self._lengths, self._offsets = stride, lengths, offsets
        self._length_per_key = length_per_key

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        assert self._weights is not None
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def lengths_or_none(self) -> torch.Tensor | None:
        return self._lengths

    def offsets_or_none(self) -> torch.Tensor | None:
        return self._offsets

    def offsets(self) -> torch.Tensor:
        if self._offsets is None:
            assert self._lengths is not None
            ends = self._lengths.cumsum(0, dtype=self._lengths.dtype)
            self._offsets = torch.cat([self._lengths.new_zeros(1), ends])
        return self._offsets

    def length_per_key_or_none(self) -> list[int] | None:
        return self._length_per_key

    def stride(self) -> int:
        return self._stride

    def variable_stride_per_key(self) -> bool:
        return False

    def permute(self, order: Sequence[int]) -> "PlainBatch":
        offsets, samples = self.offsets(), self._stride
        bags = torch.cat([torch.arange(samples) + key * samples for key in order]).to(
            offsets.device
        )
        lengths = offsets.diff()[bags]
        spans = [slice(int(offsets[k * samples]), int(offsets[(k + 1) * samples])) for k in order]
        return PlainBatch(
            [self._keys[key] for key in order],
            torch.cat([self._values[span] for span in spans]),
            None if self._weights is None else torch.cat([self._weights[s] for s in spans]),
            samples,
            lengths=lengths,
        )
