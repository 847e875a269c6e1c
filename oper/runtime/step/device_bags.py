"""Bags between nodes, on any device, by torch's own operators.

What `forward_bags`, `join_bags`, `add_bags` and `gather_bags` of csrc/cpu/step/forward_bags.cpp do
to tensors of the processor, bit by bit. What is sent to a node are int32 words, as
csrc/include/oper/step/forward_bags.h says:

    bags of each feature, then accesses of each feature; then, feature after feature,
    the length of each bag; the code of each access; the weight of each access, if it has one

Sizes are known to the device first. The host waits for them twice where it forwards bags, and once
where it joins those of others. Of lengths that do not fit a batch, which the host is told of later
(late_checks.py), nothing is read or written that is not there. Descriptors of features, and all
lists, are the host's.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from torch.nn.functional import pad

from oper.plan.layout import SLOT_BITS, SLOT_MASK
from oper.runtime.tables.kernel_structs import FEATURE

# The words for each node, the places of its bags' sums, and, of weighted bags, the positions of its
# accesses in the batch; and of each bag how many accesses are kept.
Parcels = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor]

# Addresses, offsets of bags, weights if there are any, and of this rank's accesses their positions
# in the batch, if there are weights.
JoinedBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def forward_bags(
    addresses: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: torch.Tensor,
    destination_of: Sequence[int],
    destinations: int,
    places: Sequence[int],
    slot_bits: int,
    code_words: int,
) -> Parcels:
    """What bags read of other nodes, by node: feature after feature, bag after bag.

    Args:
        addresses: int64 [N].
        offsets: [bags + 1], int32 or int64; None where each bag has one access.
        weights: float32 [N].
        features: [F, FEATURE_WORDS], in the host's memory; none has a bag of another's.
        destination_of: of each rank its node's number among the others; `destinations` of this
            rank's own.
        places: of each rank its place in its node.

    Returns:
        int32 words, int64 places [bags there] and int32 positions [accesses there] for each node;
        and int32 [bags], of which those of other features than these mean nothing.
    """
    own = features.numpy().view(FEATURE)[:, 0]
    keys = destinations * len(own)  # one for each node and feature; one more for what stays
    strides = own["out_stride"].tolist()
    bases = (own["out_base"] - own["first_bag"] * own["out_stride"]).tolist()
    is_elsewhere, first_key, first_code, bound, feature_from, base, stride = _brought(
        addresses.device,
        [to < destinations for to in destination_of],
        [to * len(own) for to in destination_of],
        [place << slot_bits for place in places],
        *_bounds(own, keys),
        bases * destinations,
        strides * destinations,
    )

    begins = _begins(addresses, offsets)
    position = _elsewhere(addresses, is_elsewhere).nonzero()[:, 0]  # the host waits
    kept = begins.diff() - torch.searchsorted(position, begins).diff()
    bag = torch.searchsorted(begins, position, right=True) - 1
    address = addresses[position]
    feature = feature_from[torch.searchsorted(bound, bag, right=True)]
    key = (first_key[address >> SLOT_BITS] + feature).clamp_(max=keys)
    # Narrow, as sorting takes a pass for each byte. Accesses are in the batch's order, and stay so.
    narrow = (torch.uint8, torch.int16, torch.int32)
    key = key.to(next(dtype for dtype in narrow if keys < torch.iinfo(dtype).max))
    key, order = key.sort(stable=True)
    position, bag, address = position[order], bag[order], address[order]

    # Where bags begin: as many as there are, and then the end, as the host knows no number yet.
    is_first = torch.ones_like(key, dtype=torch.bool)
    is_first[1:] = (key[1:] != key[:-1]) | (bag[1:] != bag[:-1])
    size = len(key)
    begin = is_first.nonzero_static(size=size, fill_value=size)[:, 0]
    lengths = pad(begin, (0, 1), value=size).diff().int()
    accesses_before = torch.searchsorted(
        key, torch.arange(keys + 1, dtype=key.dtype, device=key.device)
    )
    before = torch.stack([torch.searchsorted(begin, accesses_before), accesses_before])
    counts = before.diff().view(2, destinations, len(own)).transpose(0, 1)
    heads = counts.reshape(destinations, 2 * len(own)).int()
    bags, accesses = before.tolist()  # the host waits

    begin = begin[: bags[-1]]
    of_bag = key[begin].long()
    place = base[of_bag] + bag[begin] * stride[of_bag]
    code = first_code[address >> SLOT_BITS] | address & SLOT_MASK
    codes = code.int() if code_words == 1 else code.view(torch.int32)
    parcels: Parcels = ([], [], [], kept.int())
    for n in range(destinations):
        one, next_one = n * len(own), (n + 1) * len(own)
        of_bags = slice(bags[one], bags[next_one])
        of_accesses = slice(accesses[one], accesses[next_one])
        there = position[of_accesses]
        words = [heads[n], lengths[of_bags], codes.view(-1, code_words)[of_accesses].flatten()]
        if weights is not None:
            words.append(weights[there].view(torch.int32))
            parcels[2].append(there.int())
        parcels[0].append(torch.cat(words))
        parcels[1].append(place[of_bags])
    return parcels


def join_bags(
    addresses: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: torch.Tensor,
    forwards: Sequence[int],
    destination_of: Sequence[int],
    destinations: int,
    kept: torch.Tensor,
    received: Sequence[torch.Tensor],
    forwarded_features: int,
    fields: Sequence[int],
    slot_bits: int,
    code_words: int,
) -> JoinedBatch:
    """A batch without the accesses that it forwards, and after it the bags that came.

    Args:
        features: of all bags, in their order; each access is in one of those.
        forwards: how many accesses each forwards.
        kept: int32 [bags], as `forward_bags` returned it; it is not read of features that forward
            none.
        received: the words of each client.
        forwarded_features: how many features all ranks forward.
        fields: of each rank of this node its field in addresses here.

    Others as of `forward_bags`.
    """
    first = features.numpy().view(FEATURE)[:, 0]["first_bag"].tolist()
    is_elsewhere, begin_of, stays, field_of = _brought(
        addresses.device,
        [to < destinations for to in destination_of],
        first[1:],
        [number == 0 for number in forwards],
        [field << SLOT_BITS for field in fields],
    )
    begins = _begins(addresses, offsets)
    lengths = begins.diff()
    stays = stays.bool()
    left = torch.where(_spread(stays, begin_of, len(lengths)), lengths, kept)
    remains = _spread(stays, begins[begin_of], len(addresses))
    remains |= ~_elsewhere(addresses, is_elsewhere)
    # How many there are is known, so that the host need not wait.
    own = len(addresses) - sum(forwards)
    position = remains.nonzero_static(size=own)[:, 0]

    all_lengths, all_codes = [left.int()], [addresses.new_empty(0, dtype=torch.int32)]
    all_weights = [] if weights is None else [weights[position]]
    for words, head in zip(received, head_words(received, forwarded_features), strict=True):
        bags, accesses = sum(head[:forwarded_features]), sum(head[forwarded_features:])
        sizes = [len(head), bags, code_words * accesses, accesses if weights is not None else 0]
        _, of_bags, codes, of_accesses = words.split(sizes)
        all_lengths.append(of_bags)
        all_codes.append(codes)
        if weights is not None:
            all_weights.append(of_accesses.view(torch.float32))
    codes = torch.cat(all_codes)
    code = codes.long() if code_words == 1 else codes.view(torch.int64)
    # What came over a network may name no rank.
    field = field_of[(code >> slot_bits).clamp_(0, len(fields) - 1)]
    came = field | code & (1 << slot_bits) - 1
    return (
        torch.cat([addresses[position], came]),
        pad(torch.cat(all_lengths).cumsum(0, dtype=torch.int32), (1, 0)),
        None if weights is None else torch.cat(all_weights),
        (position if weights is not None else position[:0]).int(),
    )


def head_words(parcels: Sequence[torch.Tensor], features: int) -> list[list[int]]:
    """The words that each parcel begins with: bags and then accesses of each feature. The host
    waits once for all."""
    if not parcels:
        return []
    found: list[list[int]] = torch.stack([words[: 2 * features] for words in parcels]).tolist()
    return found


def add_bags(
    out: torch.Tensor,
    places: torch.Tensor,
    counts: Sequence[int],
    dims: Sequence[int],
    vectors: torch.Tensor,
) -> None:
    """Add a vector to each bag of `out`, flat float32.

    Args:
        places: int64 [bags], where the bags begin in `out`; none overlaps another.
        counts: how many of them each feature has.
        dims: of each feature.
        vectors: float32, those of all bags, one after the other.
    """
    for dim, place, of_bags in _by_dim(places, counts, dims, vectors):
        # Not by atomic additions, as those of index_add_, which take subnormal values for zeros.
        at = place[:, None] + torch.arange(dim, device=place.device)
        out[at] = out[at] + of_bags


def gather_bags(
    values: torch.Tensor,
    places: torch.Tensor,
    counts: Sequence[int],
    dims: Sequence[int],
    vectors: torch.Tensor,
) -> None:
    """Read the vector of each bag of `values` into `vectors`; arguments as of `add_bags`."""
    for dim, place, of_bags in _by_dim(places, counts, dims, vectors):
        torch.index_select(values.unfold(0, dim, 1), 0, place, out=of_bags)


def _by_dim(
    places: torch.Tensor, counts: Sequence[int], dims: Sequence[int], vectors: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The places and vectors [bags, dim] of features that follow each other and have one dim."""
    bag = value = 0
    with_bags = ((dim, count) for dim, count in zip(dims, counts, strict=True) if count)
    for dim, alike in groupby(with_bags, key=lambda of: of[0]):
        bags = sum(count for _, count in alike)
        of_bags = vectors[value : value + bags * dim].view(bags, dim)
        yield dim, places[bag : bag + bags], of_bags
        bag, value = bag + bags, value + bags * dim


def _brought(device: torch.device, *numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The host's numbers on a device, int64 each, by one copy that is not waited for."""
    together = torch.tensor([*chain(*numbers)], dtype=torch.int64)
    return together.to(device, non_blocking=True).split([len(some) for some in numbers])


def _bounds(features: np.ndarray, none: int) -> tuple[list[int], list[int]]:
    """At which bags features begin or end, and which feature bags are of before the first of these
    bounds, and from each on; `none` where they are of no feature."""
    found: dict[int, int] = {}
    for f, (first, bags) in enumerate(features[["first_bag", "bags"]].tolist()):
        if bags:
            found[first] = f
            found.setdefault(first + bags, none)
    bounds = sorted(found)
    return bounds, [none, *(found[bag] for bag in bounds)]


def _begins(addresses: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Where bags begin, and where the last ends, int64 [bags + 1]."""
    if offsets is None:
        return torch.arange(len(addresses) + 1, device=addresses.device)
    return offsets.long()


def _elsewhere(addresses: torch.Tensor, is_elsewhere: torch.Tensor) -> torch.Tensor:
    """Which addresses are of rows of other nodes, bool [N]; `is_elsewhere` [ranks] says which ranks
    are. An address that names no rank is of this node's."""
    rank = (addresses >> SLOT_BITS).clamp_(-1, len(is_elsewhere))
    return pad(is_elsewhere.bool(), (0, 1))[rank]


def _spread(values: torch.Tensor, begins: torch.Tensor, size: int) -> torch.Tensor:
    """Values of parts [n] for each of `size` things; `begins` [n - 1] is where all parts but the
    first begin."""
    things = torch.arange(size, device=values.device)
    return values[torch.searchsorted(begins, things, right=True)]
