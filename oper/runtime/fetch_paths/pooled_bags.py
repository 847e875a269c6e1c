"""Pooled fetch: bags that read rows of other nodes are forwarded there, and come back as sums.

Ranks of one node read each other's rows by pointer. What a bag of a pooled table reads of another
node's rows is forwarded to this rank's proxy there (allreduce/proxies.py), for whom it is one more
bag of its own batch:

    prepare    the ranks exchange bags, and each joins those of its clients to its batch; all else
               that prepares a batch sees the joined one
    forward    the sums of the clients' bags are sent back, a vector each, and added to the output:
               this rank's own part of a bag first, then those of the other nodes, in their order
    backward   the gradient of each forwarded bag, a vector, goes the same way and is a part of the
               gradient of the joined batch, by which rows are updated as ever

Ranks exchange bags when a batch is prepared, and not when it is looked up, as only so are a batch's
accesses sorted once, and beside the lookup. They must prepare batches in the same order, as they
must look them up. A bag's mean is taken here: what comes back is a sum, and gradients are divided
before they are sent. No bag is forwarded that reads nothing of another node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from oper.plan.layout import LOCAL
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.exchange import AllToAll
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.memory.forwarded_bags import ArrivingGradient, ClientBags, ForwardedBags, SentBags
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.tables.features import FeatureSet
from oper.runtime.tables.kernel_structs import as_features, as_words

_WORD_BITS = 31  # of a code that is sent as one word


class Accesses(NamedTuple):
    """The accesses of a batch's features, and which bags they are of (prepared_batch.py)."""

    addresses: torch.Tensor
    segment_offset: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    features: torch.Tensor


class BagForwarding:
    """The exchange of bags between nodes, of one engine on one rank.

    `join`, `start_sums`, `gradients` and `weight_gradients` are collective, in one order on all
    ranks.
    """

    def __init__(
        self, memory: TableMemory, features: FeatureSet, slots: np.ndarray, all_to_all: AllToAll
    ) -> None:
        node = memory.node
        self._ranks, self._all_to_all = node.ranks, all_to_all
        device = memory.heap.device
        self._device, self._on = device, device.torch_device
        self._proxies = proxies = Proxies(node, device)
        others = [members for members in proxies.nodes if node.rank not in members]
        # Of each rank its node's number among the others, and of this node's how many there are.
        self._nodes = [
            next((n for n, members in enumerate(others) if r in members), len(others))
            for r in range(node.ranks)
        ]
        self._places = [
            next(members.index(r) for members in proxies.nodes if r in members)
            for r in range(node.ranks)
        ]
        self._fields = [LOCAL if r == node.rank else r for r in node.peers]
        self._place_bits = (max(map(len, proxies.nodes)) - 1).bit_length()
        self.resize(slots)
        # In the order of the module's lookups, which is the same on all ranks, whatever order the
        # keys of their batches are in.
        bucket_of = [memory.buckets[lookup.bucket] for lookup in features.features]
        self._lookups = [n for n, bucket in enumerate(bucket_of) if bucket.pooled]
        self._dims = [bucket_of[n].dim for n in self._lookups]

    @classmethod
    def of(
        cls, memory: TableMemory, features: FeatureSet, slots: np.ndarray
    ) -> "BagForwarding | None":
        """What forwards the bags of pooled tables; None if there are no such tables, or no other
        nodes. `slots` [W, M] are those of all arenas. For all ranks to call."""
        pooled = any(bucket.pooled for bucket in memory.buckets)
        if not pooled or memory.all_to_all is None:
            return None
        return cls(memory, features, slots, memory.all_to_all)

    def resize(self, slots: np.ndarray) -> None:
        """All arenas have these slots from now on, [W, M]."""
        slot_bits = (int(slots.max(initial=1)) - 1).bit_length()
        self._codes = (slot_bits, 1 if slot_bits + self._place_bits <= _WORD_BITS else 2)

    # Preparing a batch.

    def join(self, given: Accesses) -> tuple[Accesses, ForwardedBags]:
        """A batch without what its bags read of other nodes, and with the bags of this rank's
        clients, whose sums have an output of their own."""
        own = as_features(given.features)
        number = {int(lookup): f for f, lookup in enumerate(own["lookup"])}
        pooled = [number[lookup] for lookup in self._lookups]
        read = (given.addresses, given.offsets, _detached(given.weights))
        nodes = (self._nodes, len(self._proxies.proxies))
        ops, stream = self._device.ops(), self._device.stream
        how = (*nodes, self._places, *self._codes, stream)
        words, places, positions, left, sent_heads = ops.forward_bags(
            *read, given.features[pooled], *how
        )
        received = self._exchange(words)
        heads = self._heads([*received.values()])

        # Bags and accesses of each feature.
        counts = sent_heads.view(len(words), 2, len(pooled)).numpy()
        came = heads.view(len(received), 2, len(pooled)).numpy()
        forwards = np.zeros(len(own), dtype=np.int64)
        forwards[pooled] = counts[:, 1].sum(axis=0)
        kept = np.diff(given.segment_offset.cpu().numpy()) - forwards
        joined = own.copy()
        joined["mean"][pooled] = 0
        clients = self._of_clients(own[pooled], [*received], came, int(own["bags"].sum()))
        addresses, offsets, weights, own_positions = ops.join_bags(
            *read,
            given.features,
            forwards.tolist(),
            *nodes,
            left,
            list(received.values()),
            len(pooled),
            self._fields,
            *self._codes,
            heads,
            stream,
        )
        ends = np.concatenate([[0], kept, came[:, 1].reshape(-1)]).cumsum()
        features = as_words(np.concatenate([joined, as_features(clients.features)]))
        sent = [
            SentBags(
                proxy,
                places[n],
                bags.tolist(),
                int(accesses.sum()),
                int(bags @ self._dims),
                words[n].nbytes,
                positions[n] if positions else None,
            )
            for n, (proxy, (bags, accesses)) in enumerate(
                zip(self._proxies.proxies, counts, strict=True)
            )
        ]
        return (
            Accesses(addresses, torch.from_numpy(ends).to(self._on), offsets, weights, features),
            ForwardedBags(
                given.features, given.weights, int(kept.sum()), own_positions, sent, clients
            ),
        )

    def _exchange(self, words: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send each proxy its words; those that each client sent here, by client."""
        parts = [torch.empty(0, dtype=torch.int32, device=self._on)] * self._ranks
        for proxy, parcel in zip(self._proxies.proxies, words, strict=True):
            parts[proxy] = parcel
        came = self._all_to_all.send(parts, "forward its bags")
        return {client: came[client] for client in self._proxies.clients}

    def _heads(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the words of each client begin with, on the host, which waits for a device once:
        bags and then accesses of each pooled feature, int64 [clients, 2 · features]."""
        size = 2 * len(self._lookups)
        if not received:
            return torch.empty((0, size), dtype=torch.int64)
        return torch.stack([words[:size] for words in received]).cpu().long()

    def _of_clients(
        self, pooled: np.ndarray, clients: Sequence[int], counts: np.ndarray, first_bag: int
    ) -> ClientBags:
        """The clients' bags, from number `first_bag` on, as features like the `pooled` ones;
        `counts` [clients, 2, features] are their bags and accesses."""
        features, bags = np.tile(pooled, len(clients)), counts[:, 0].reshape(-1)
        values = bags * features["dim"]
        features["bags"], features["mean"] = bags, 0
        features["first_bag"] = first_bag + bags.cumsum() - bags
        features["out_base"] = values.cumsum() - values
        features["out_stride"] = features["dim"]
        sums = counts[:, 0] @ np.array(self._dims, dtype=np.int64)
        accesses = counts[:, 1].sum(axis=1)
        of_client = (dict(zip(clients, of.tolist(), strict=True)) for of in (sums, accesses))
        return ClientBags(as_words(features), *of_client)

    # A step.

    def start_sums(
        self, bags: ForwardedBags, sums: torch.Tensor
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin to send clients the sums of their bags, laid out as `bags.clients` says. What is
        returned must be called: it gives those of this rank's own bags, by proxy."""
        sizes = {sent.proxy: sent.elements for sent in bags.sent}
        into = self._device.new(sum(sizes.values()), torch.float32)
        return self._proxies.start(sums, bags.clients.elements, into, sizes, "add up its bags")

    def add_sums(
        self, batch: PreparedBatch, out: torch.Tensor, sums: Mapping[int, torch.Tensor]
    ) -> None:
        """Add what came of each node to a batch's output, flat float32, and take the means of
        bags."""
        assert batch.forwarded is not None
        for sent in batch.forwarded.sent:
            vectors = sums[sent.proxy]
            bags = (sent.places, sent.counts, self._dims)
            self._device.ops().add_bags(out, *bags, vectors, self._device.stream)
        self._divide_means(batch, out)

    def gradients(
        self, batch: PreparedBatch, grad: torch.Tensor
    ) -> tuple[PreparedBatch, torch.Tensor]:
        """The batch with the gradient of its clients' bags, which must be waited for, and the
        gradient of its own output, flat float32, by which means count as sums."""
        bags = batch.forwarded
        assert bags is not None
        if any(self._means(batch)):
            grad = grad.clone()
            self._divide_means(batch, grad)
        sizes = {sent.proxy: sent.elements for sent in sorted(bags.sent, key=lambda s: s.proxy)}
        outgoing = self._device.new(sum(sizes.values()), torch.float32)
        parts = dict(zip(sizes, outgoing.split(list(sizes.values())), strict=True))
        for sent in bags.sent:
            vectors = parts[sent.proxy]
            of_node = (sent.places, sent.counts, self._dims)
            self._device.ops().gather_bags(grad, *of_node, vectors, self._device.stream)
        theirs = self._device.new(bags.clients.all_elements, torch.float32)
        action = "send gradients of its bags"
        finish = self._proxies.start(outgoing, sizes, theirs, bags.clients.elements, action)
        arriving = ArrivingGradient(theirs, finish)
        return replace(batch, forwarded=replace(bags, grad=arriving)), grad

    def weight_gradients(self, bags: ForwardedBags, found: torch.Tensor) -> torch.Tensor:
        """The gradients of the weights that a batch was given with [N], from those of the joined
        batch's, some of which are the clients'."""
        assert bags.weights is not None
        sizes = {sent.proxy: sent.accesses for sent in bags.sent}
        theirs, into = found[bags.accesses :], found.new_empty(sum(sizes.values()))
        action = "send gradients of its bags' weights"
        came = self._proxies.start(theirs, bags.clients.accesses, into, sizes, action)()
        result = torch.empty_like(bags.weights)
        result[bags.positions.long()] = found[: bags.accesses]
        for sent in bags.sent:
            assert sent.positions is not None
            result[sent.positions.long()] = came[sent.proxy]
        return result

    def count(self, bags: ForwardedBags, counters: Counters) -> None:
        """Count a batch's bags that were forwarded, and what their sums take."""
        counted = np.zeros((4, self._ranks), dtype=np.int64)
        for sent in bags.sent:
            numbers = (sum(sent.counts), sent.accesses, sent.request_bytes, 4 * sent.elements)
            counted[:, sent.proxy] = numbers
        names = ("forwarded_bags", "forwarded_accesses", "forwarded_bytes", "bag_sum_bytes")
        counters.add(**dict(zip(names, counted, strict=True)))

    def count_gradients(self, bags: ForwardedBags, counters: Counters) -> None:
        """Count the gradients of a batch's bags that were forwarded."""
        counted = np.zeros(self._ranks, dtype=np.int64)
        for sent in bags.sent:
            counted[sent.proxy] = 4 * sent.elements
        counters.add(bag_gradient_bytes=counted)

    def _means(self, batch: PreparedBatch) -> list[bool]:
        """Of which of its own features a batch's bags are divided here: those of pooled tables. The
        others' are where they are added up."""
        assert batch.forwarded is not None
        if batch.bags is None:  # of one access each
            return [False] * len(batch.forwarded.features)
        features, lookups = as_features(batch.forwarded.features), {*self._lookups}
        return [bool(f["mean"]) and int(f["lookup"]) in lookups for f in features]

    def _divide_means(self, batch: PreparedBatch, sums: torch.Tensor) -> None:
        """Divide what lies as a batch's output, flat, by lengths of bags whose mean is taken."""
        assert batch.forwarded is not None
        for f, is_mean in enumerate(self._means(batch)):
            if is_mean:
                feature = as_features(batch.forwarded.features)[f]
                shape = (batch.samples, int(feature["dim"]))
                stride = (int(feature["out_stride"]), 1)
                bags = sums.as_strided(shape, stride, int(feature["out_base"]))
                bags.div_(batch.lengths[f].clamp(min=1)[:, None])


def _detached(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.detach()
