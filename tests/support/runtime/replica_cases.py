"""Gradients of replicas on several ranks, and their AllReduce by ranks that are processes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.cost.allreduce import NodeSum
from oper.runtime.allreduce.replica_allreduce import BucketReplicas, ReplicaAllReduce
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out

COUNTERS = ("marked", "published", "reduced", "applied")


@dataclass(frozen=True)
class Case:
    """Gradients of all ranks, each made from the seed. `touched`: the share of its replicas that a
    rank touches in each step."""

    seed: int
    ranks: int
    buckets: tuple[tuple[int, int], ...]  # replicas, dim
    touched: tuple[float, ...]
    spread: bool = False  # the replicas of a bucket lie among others' slots
    whole: bool = False  # gradients are small whole numbers

    def replicas(self) -> list[np.ndarray]:
        """The slots of each bucket's replicas."""
        rng = np.random.default_rng(self.seed)
        return [
            np.sort(rng.choice(3 * n, n, replace=False)) if self.spread else np.arange(n)
            for n, _ in self.buckets
        ]

    def slots_and_grads(self, step: int, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng([self.seed, step, rank])
        given = []
        for replicas, (_, dim) in zip(self.replicas(), self.buckets, strict=True):
            size = rng.binomial(len(replicas), self.touched[step])
            slots = np.sort(rng.choice(replicas, size, replace=False)).astype(np.int64)
            grads = rng.standard_normal((size, dim)).astype(np.float32)
            if self.whole:
                grads = np.rint(4 * grads)
            grads[rng.random(size) < 0.1] = -0.0  # touched, and yet nothing but zeros
            given.append((slots, grads))
        return given


def rows_and_sums(
    given: list[tuple[np.ndarray, np.ndarray]],
    ranks: int,
    dims: list[int],
    owned: int = 0,
    device: Device | None = None,
) -> tuple[SortedRows, RowGradients]:
    """Replicas of each bucket and their gradients among a batch's rows, of which every rank owns
    `owned` of each bucket. What is behind them is anything."""
    slots, sizes = [], []
    for of_bucket, _ in given:
        slots += [of_bucket, *[np.arange(owned)] * ranks]
        sizes += [len(of_bucket)] + [owned] * ranks
    before = torch.tensor([0, *np.cumsum(sizes)])
    all_slots = torch.from_numpy(np.concatenate([*slots, np.full(3, -7)]).astype(np.int64))
    groups = laid_out(before, dims, Cpu())
    values = torch.full((int(groups[1, -1]) + 5,), torch.nan)
    for b, (_, grads) in enumerate(given):
        place = int(groups[1, b * (1 + ranks)])
        values[place : place + grads.size] = torch.from_numpy(grads.reshape(-1))
    on = Cpu.torch_device if device is None else device.torch_device
    all_slots, groups, values = all_slots.to(on), groups.to(on), values.to(on)
    return SortedRows(all_slots, groups[0], ranks), RowGradients(all_slots, groups, values)


def groups_of(sums: RowGradients, dims: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Slots and gradients of each bucket."""
    before = sums.groups[0].tolist()
    return [
        (sums.slots[before[b] : before[b + 1]], sums.gradients_of(range(b, b + 1), dim))
        for b, dim in enumerate(dims)
    ]


def reduce_case(
    rank: int,
    group,
    case: Case,
    method: str,
    nodes: list[int],
    device: Device | None = None,
    node_sum: NodeSum = "at_once",
) -> tuple[list[Any], list[tuple[int, int]]]:
    """On a rank: the results of all steps, and the bytes counted, all and over the network. A
    bucket without replicas has rows in the group of replicas all the same."""
    node = Node.join(group, 60.0, nodes)
    signals = Signals(node, COUNTERS, None if device is None else device.done)
    dims = [dim for _, dim in case.buckets]
    replicas = [torch.from_numpy(slots) for slots in case.replicas()]
    buckets = list(map(BucketReplicas, replicas, dims))
    reduce = ReplicaAllReduce(method, node, signals, buckets, device, node_sum)
    results, counted = [], []
    for step in range(1, len(case.touched) + 1):
        given = case.slots_and_grads(step - 1, rank)
        given = [
            part if count else (np.arange(4), np.ones((4, dim), np.float32))
            for part, (count, dim) in zip(given, case.buckets, strict=True)
        ]
        rows, sums = rows_and_sums(given, case.ranks, dims, owned=step, device=device)
        reduce.begin(step, rows)
        reduce.contribute(step, sums)
        signals.post("published", step)
        signals.wait("published", step, "publish")
        reduce.reduce(step)
        found = groups_of(reduce.result(step), dims)
        results.append(
            [(slots.cpu().numpy().copy(), part.cpu().numpy().copy()) for slots, part in found]
        )
        counted.append((int(reduce.bytes), reduce.network_bytes))
    return results, counted
