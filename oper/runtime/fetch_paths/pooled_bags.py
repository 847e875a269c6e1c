"""Pooled bags: bags that read rows of other nodes are forwarded there, and come back as sums.

Ranks of one node read each other's rows by pointer. The part of a pooled table's bag that reads
rows of another node is forwarded to this rank's proxy there (allreduce/proxies.py), which treats it
as one more bag of its own batch:

    prepare    the ranks exchange bags, and each joins the bags of its clients to its batch; the
               rest of the preparation sees the joined batch
    forward    the sums of the clients' bags are sent back, a vector each, and added to the output:
               this rank's own part of a bag first, then those of the other nodes, in their order
    backward   the gradient of each forwarded bag, a vector, goes the same way and becomes a part of
               the gradient of the joined batch, by which rows are updated

Ranks exchange bags when a batch is prepared, not when it is looked up: so accesses are sorted once,
in parallel with the lookup. Ranks must prepare batches in one order, and look them up in one order.
A bag's mean is taken here: sums come back, and gradients are divided before they are sent. A bag
that reads no row of another node is not forwarded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.plan.layout import LOCAL
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.exchange import AllToAll
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import Accesses, FetchPath, PathOver
from oper.runtime.memory.forwarded_bags import ArrivingGradient, ClientBags, ForwardedBags, SentBags
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch, Runs
from oper.runtime.tables.features import FeatureSet
from oper.runtime.tables.kernel_structs import as_features, as_words

_WORD_BITS = 31  # of a code that is sent as one word


class PooledBags(PathOver):
    """The path of pooled tables between several nodes, over the path of all others. `slots` [W, M]
    are those of all arenas."""

    def __init__(
        self,
        memory: TableMemory,
        below: FetchPath,
        features: FeatureSet,
        slots: Ints,
        all_to_all: AllToAll,
    ) -> None:
        super().__init__(memory, below)
        self.needs = replace(below.needs, together=True, messages=True)
        self._all_to_all = all_to_all
        node, device = memory.node, memory.heap.device
        self._on = device.torch_device
        self._proxies = proxies = Proxies(node, device)
        others = [members for members in proxies.nodes if node.rank not in members]
        # The number of each rank's node among the other nodes; their count for ranks of this node.
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
        self._code(slots)
        # In the order of the module's lookups, which all ranks share, unlike the order of the keys
        # of their batches.
        bucket_of = [memory.buckets[lookup.bucket] for lookup in features.features]
        self._lookups = [n for n, bucket in enumerate(bucket_of) if bucket.pooled]
        self._dims = [bucket_of[n].dim for n in self._lookups]

    def resize(self, slots: Ints) -> None:
        """See FetchPath."""
        super().resize(slots)
        self._code(slots)

    def _code(self, slots: Ints) -> None:
        """Choose the bits of a slot in the code of a forwarded address, and the words of a code."""
        slot_bits = (int(slots.max(initial=1)) - 1).bit_length()
        self._codes = (slot_bits, 1 if slot_bits + self._place_bits <= _WORD_BITS else 2)

    # Preparing a batch.

    def prepare(self, given: Accesses) -> tuple[Accesses, ForwardedBags | None]:
        """See FetchPath. The accesses are those of the batch on this node, and those of the bags of
        this rank's clients, whose sums have an output of their own."""
        own = as_features(given.features)
        number = {int(lookup): f for f, lookup in enumerate(own["lookup"])}
        pooled = [number[lookup] for lookup in self._lookups]
        read = (given.addresses, given.offsets, _detached(given.weights))
        nodes = (self._nodes, len(self._proxies.proxies))
        ops, stream = self._device.ops(), self._device.stream
        targets = (*nodes, self._places, *self._codes, stream)
        words, places, positions, left, sent_heads = ops.forward_bags(
            *read, given.features[pooled], *targets
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
        """Send each proxy its words, and return the words of each client."""
        parts = [torch.empty(0, dtype=torch.int32, device=self._on)] * self._ranks
        for proxy, parcel in zip(self._proxies.proxies, words, strict=True):
            parts[proxy] = parcel
        came = self._all_to_all.send(parts, "forward its bags")
        return {client: came[client] for client in self._proxies.clients}

    def _heads(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the first words of each client, on the host, which waits for a device once: bags
        and then accesses of each pooled feature, int64 [clients, 2 · features]."""
        size = 2 * len(self._lookups)
        if not received:
            return torch.empty((0, size), dtype=torch.int64)
        return torch.stack([words[:size] for words in received]).cpu().long()

    def _of_clients(
        self, pooled: np.ndarray, clients: Sequence[int], counts: np.ndarray, first_bag: int
    ) -> ClientBags:
        """Return the clients' bags, from number `first_bag` on, as features like the `pooled` ones;
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

    # Reading.

    def read(self, batch: PreparedBatch) -> torch.Tensor:
        """See FetchPath. Sums of clients' bags go out before this rank's own bags are added up."""
        bags = batch.forwarded
        assert bags is not None
        self._device.keep(batch.read)
        with self.reading():
            rows = self.fetch(batch)
            clients = bags.clients
            sums = self.add_up(batch, rows, clients.features, clients.all_elements)
            finish = self._start_sums(bags, sums)
            try:
                own = batch.features[: len(bags.features)]
                out = self.add_up(batch, rows, own, batch.out_elements)
            finally:
                came = finish()
        self._add_sums(batch, out, came)
        return out

    def _start_sums(
        self, bags: ForwardedBags, sums: torch.Tensor
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin to send clients the sums of their bags, laid out as `bags.clients` says. Return a
        function, to be called once, that gives the sums of this rank's own bags by proxy."""
        sizes = {sent.proxy: sent.elements for sent in bags.sent}
        into = self._device.new(sum(sizes.values()), torch.float32)
        return self._proxies.start(sums, bags.clients.elements, into, sizes, "add up its bags")

    def _add_sums(
        self, batch: PreparedBatch, out: torch.Tensor, sums: Mapping[int, torch.Tensor]
    ) -> None:
        """Add the sums of each node to a batch's output, flat, and take the means of bags."""
        assert batch.forwarded is not None
        for sent in batch.forwarded.sent:
            vectors = sums[sent.proxy]
            bags = (sent.places, sent.counts, self._dims)
            self._device.ops().add_bags(out, *bags, vectors, self._device.stream)
        self._divide_means(batch, out)

    # Backward.

    @contextmanager
    def backward(
        self, batch: PreparedBatch, grad: torch.Tensor, counters: Counters
    ) -> Iterator[tuple[PreparedBatch, torch.Tensor]]:
        """See FetchPath. The batch has the gradient of its clients' bags, which may be on its way;
        by the gradient of its own output means count as sums."""
        bags = batch.forwarded
        assert bags is not None
        self._count_gradients(bags, counters)
        batch, grad, arriving = self._start_gradients(batch, bags, grad)
        try:
            with super().backward(batch, grad, counters) as passed:
                yield passed
        finally:
            arriving.wait()

    def _start_gradients(
        self, batch: PreparedBatch, bags: ForwardedBags, grad: torch.Tensor
    ) -> tuple[PreparedBatch, torch.Tensor, ArrivingGradient]:
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
        return replace(batch, forwarded=replace(bags, grad=arriving)), grad, arriving

    def weight_gradients(self, batch: PreparedBatch, grad: torch.Tensor) -> torch.Tensor:
        """See FetchPath."""
        bags = batch.forwarded
        assert bags is not None
        assert bags.grad is not None
        with self.reading():
            rows = self.fetch_again(batch)
            gradients = self.weigh(batch, grad, rows, batch.features[: len(bags.features)])
            bags.grad.wait()
            theirs = self.weigh(batch, bags.grad.values, rows, bags.clients.features)
        gradients[bags.accesses :] = theirs[bags.accesses :]
        return self._exchange_weight_gradients(bags, gradients)

    def _exchange_weight_gradients(
        self, bags: ForwardedBags, gradients: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients of the weights that a batch was given with [N], from those of the
        joined batch's, some of which are the clients'."""
        assert bags.weights is not None
        sizes = {sent.proxy: sent.accesses for sent in bags.sent}
        theirs, into = gradients[bags.accesses :], gradients.new_empty(sum(sizes.values()))
        action = "send gradients of its bags' weights"
        came = self._proxies.start(theirs, bags.clients.accesses, into, sizes, action)()
        result = torch.empty_like(bags.weights)
        result[bags.positions.long()] = gradients[: bags.accesses]
        for sent in bags.sent:
            assert sent.positions is not None
            result[sent.positions.long()] = came[sent.proxy]
        return result

    def sum_gradients(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        sum_groups: Callable[[torch.Tensor, slice], None],
    ) -> None:
        """See FetchPath. Bags of other nodes read no replicas: sorted ones are summed on the CPU
        while the gradients of such bags are on their way."""
        bags = batch.forwarded
        assert bags is not None
        assert bags.grad is not None
        replicas, others = slice(1), slice(1, None)
        on_host = self._device.kind == "cpu"
        if isinstance(batch.rows, Runs) and on_host:
            sum_groups(grad, replicas)
            bags.grad.wait()
            sum_groups(grad, others)
            return
        bags.grad.wait()
        if not on_host:
            # As one gradient, in which the clients' bags come after this rank's (prepare_batch.py).
            grad = torch.cat([grad.reshape(-1), bags.grad.values.to(grad.dtype)])
        sum_groups(grad, slice(None))

    # Counters and refusals.

    def count(self, batch: PreparedBatch, counters: Counters) -> None:
        """See FetchPath."""
        super().count(batch, counters)
        bags = batch.forwarded
        assert bags is not None
        counted = np.zeros((4, self._ranks), dtype=np.int64)
        for sent in bags.sent:
            numbers = (sum(sent.counts), sent.accesses, sent.request_bytes, 4 * sent.elements)
            counted[:, sent.proxy] = numbers
        names = ("forwarded_bags", "forwarded_accesses", "forwarded_bytes", "bag_sum_bytes")
        counters.add(**dict(zip(names, counted, strict=True)))

    def _count_gradients(self, bags: ForwardedBags, counters: Counters) -> None:
        counted = np.zeros(self._ranks, dtype=np.int64)
        for sent in bags.sent:
            counted[sent.proxy] = 4 * sent.elements
        counters.add(bag_gradient_bytes=counted)

    def check_graphs(self) -> None:
        """See FetchPath."""
        raise OperError(
            "a graph of torch.compile cannot look up pooled tables, whose bags are forwarded to "
            "other nodes: leave the lookup out of it, as the sharded modules do"
        )

    def _means(self, batch: PreparedBatch) -> list[bool]:
        """Return the features of a batch whose bags are divided here: those of pooled tables. The
        bags of others are divided when they are added up."""
        assert batch.forwarded is not None
        if batch.bags is None:  # of one access each
            return [False] * len(batch.forwarded.features)
        features, lookups = as_features(batch.forwarded.features), {*self._lookups}
        return [bool(f["mean"]) and int(f["lookup"]) in lookups for f in features]

    def _divide_means(self, batch: PreparedBatch, sums: torch.Tensor) -> None:
        """Divide sums laid out as a batch's output by the lengths of bags whose mean is taken."""
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
