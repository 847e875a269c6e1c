"""What a batch's bags have to do with other nodes: which of them were forwarded there, and which
came from there (fetch_paths/pooled_bags.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class SentBags:
    """The bags that a rank forwarded to its proxy in one node, feature after feature.

    `places` [bags] is where each one's sum begins in the output, `counts` how many each pooled
    feature has. `elements` are the values of all sums, `positions` [accesses] where the accesses
    are in the batch, None of bags without weights. `request_bytes` were sent for them.
    """

    proxy: int
    places: torch.Tensor  # int64
    counts: Sequence[int]
    accesses: int
    elements: int
    request_bytes: int
    positions: torch.Tensor | None  # int32


@dataclass(frozen=True, eq=False)
class ClientBags:
    """The bags that a rank's clients forwarded to it. `features` [n, FEATURE_WORDS] lays out their
    sums, of `elements` values, from 0 on; how many values and accesses are of which client say the
    other two, in the order of clients."""

    features: torch.Tensor
    elements: Mapping[int, int]
    accesses: Mapping[int, int]

    @property
    def all_elements(self) -> int:
        """The values of all sums."""
        return sum(self.elements.values())


class ArrivingGradient:
    """The gradient of clients' sums, float32 [elements], which may be on its way: `finish` waits
    for it. It can be told where the values are before they are there."""

    def __init__(self, values: torch.Tensor, finish: Callable[[], object]) -> None:
        self.values = values
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Until the values are there."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(frozen=True, eq=False)
class ForwardedBags:
    """What is left of a batch once it is joined with the bags of clients: `features` and `weights`
    are those that it was given with. Its own `accesses` are the first of the joined batch;
    `positions` [accesses] says where they were, and is empty where there are no weights. In
    backward `grad` is the gradient of the clients' sums."""

    features: torch.Tensor  # int64 [F, FEATURE_WORDS]
    weights: torch.Tensor | None  # float32 [N]
    accesses: int
    positions: torch.Tensor  # int32
    sent: Sequence[SentBags]  # by node
    clients: ClientBags
    grad: ArrivingGradient | None = None

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """What a step reads of it where the accesses are."""
        of_sent = [part for sent in self.sent for part in (sent.places, sent.positions)]
        return [self.weights, self.positions, *of_sent]
