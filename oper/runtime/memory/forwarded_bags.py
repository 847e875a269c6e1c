"""A batch's bags that cross nodes: the bags forwarded to other nodes, and those that came from
there (fetch_paths/pooled_bags.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class SentBags:
    """The bags that a rank forwarded to its proxy in one node, feature after feature.

    `places` [bags] are the starts of the bags' sums in the output, `counts` the bags of each pooled
    feature. `elements` are the values of all sums, `positions` [accesses] the places of the
    accesses in the batch, None for bags without weights. `request_bytes` were sent for them.
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
    sums, of `elements` values, from 0 on; `elements` and `accesses` are given per client, in the
    order of clients."""

    features: torch.Tensor
    elements: Mapping[int, int]
    accesses: Mapping[int, int]

    @property
    def all_elements(self) -> int:
        """The values of all sums."""
        return sum(self.elements.values())


class ArrivingGradient:
    """The gradient of clients' sums, float32 [elements], which may be on its way: `finish` waits
    for it. The place of the values can be passed on before they are there."""

    def __init__(self, values: torch.Tensor, finish: Callable[[], object]) -> None:
        self.values = values
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Wait until the values are there."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(frozen=True, eq=False)
class ForwardedBags:
    """A batch's own part once it is joined with the bags of clients: `features` and `weights` are
    its own, as given. Its own `accesses` are the first of the joined batch; `positions` [accesses]
    are their places before, empty if there are no weights. In backward `grad` is the gradient of
    the clients' sums."""

    features: torch.Tensor  # int64 [F, FEATURE_WORDS]
    weights: torch.Tensor | None  # float32 [N]
    accesses: int
    positions: torch.Tensor  # int32
    sent: Sequence[SentBags]  # by node
    clients: ClientBags
    grad: ArrivingGradient | None = None

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors that a step reads of it on the device of the accesses."""
        of_sent = [part for sent in self.sent for part in (sent.places, sent.positions)]
        return [self.weights, self.positions, *of_sent]
