"""What a step takes of a device's memory, as a rank measures it."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.allreduce import device_allgather, device_sliced_sum
from oper.runtime.allreduce.replica_allreduce import ReplicaAllReduce
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory import device_slots, gradient_mailbox
from oper.runtime.memory.device import Device
from oper.runtime.step.apply_gradients import Gradients
from tests.support.cuda.device_engines import EmulatedDevice, device_of
from tests.support.cuda.plain_batch import PlainBatch
from tests.support.runtime.engine_cases import Case, features_of, module_tables

BATCHES_AHEAD = 2
STEPS = 3


@dataclass
class Peak:
    """The most bytes that torch had at once of what was allocated inside `measured`."""

    bytes: int = 0


@contextmanager
def measured(device: Device) -> Iterator[Peak]:
    """Measures what is allocated inside, of a device's memory or of what stands for it."""
    peak = Peak()
    if device.torch_device.type == "cuda":
        device.synchronize()
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        before = torch.cuda.memory_allocated(device.torch_device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device.torch_device) - before
        return
    gc.collect()  # what is freed inside must have been allocated there
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        yield peak
    assert profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak.bytes = int(np.cumsum([0, *(event.nbytes() for event in events)]).max())


@contextmanager
def shared_memory() -> Iterator[Callable[[str], int]]:
    """Yield a function of the bytes of the largest segments that a module asked for, all of them
    added up: segments are rounded up to whole pages."""
    asked: dict[tuple[str, int], int] = {}

    def recorded(name: str, made: Any) -> Any:
        class Recorded(made):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self._asker = name, len(asked)
                asked[self._asker] = given[-1]

            def grow(self, bytes: int) -> None:
                asked[self._asker] = bytes
                super().grow(bytes)

        return Recorded

    of_modules = {
        gradient_mailbox: "GradientSegments",
        device_sliced_sum: "GradientSegments",
        device_allgather: "GradientSegments",
        device_slots: "GrowingSegments",
    }
    with ExitStack() as patched:
        for module, segments in of_modules.items():
            made = recorded(module.__name__.rpartition(".")[2], getattr(module, segments))
            patched.enter_context(mock.patch.object(module, segments, made))
        yield lambda name: sum(size for (of, _), size in asked.items() if of == name)


def batch_of(case: Case, device: Device, step: int, rank: int, samples: int) -> PlainBatch:
    """Batches whose samples have three accesses of each feature on average."""
    rng = np.random.default_rng([case.seed, step, rank])
    keys, values, lengths = [], [], []
    for table, rows in enumerate(case.rows):
        for feature in features_of(case, table):
            keys.append(feature)
            bag_of = rng.integers(0, samples, 3 * samples)
            lengths.append(np.bincount(bag_of, minlength=samples))
            values.append(rng.integers(0, rows, 3 * samples))
    ids = torch.from_numpy(np.concatenate(values)).to(device.torch_device)
    ends = torch.from_numpy(np.concatenate([[0], np.concatenate(lengths).cumsum()]))
    weights = torch.ones(len(ids), device=device.torch_device) if case.weighted else None
    offsets = ends.to(device.torch_device)
    return PlainBatch(keys, ids, weights, stride=samples, offsets=offsets)


@dataclass(frozen=True)
class Taken:
    """Bytes that steps took at most: the ids of prepared batches, what torch allocated but for the
    outputs, and what ranks share; the replicas of each bucket. `preparing`: what torch allocated
    for a batch alone."""

    preparing: int
    ids: int
    allocated: int
    mailbox: int
    between_nodes: int  # lists and rows of other nodes, gradients that these bring
    replica_buffer: int
    replicas: list[int]
    held: list[int]  # after each batch whose gradients are accumulated

    @property
    def bytes(self) -> int:
        shared = self.mailbox + self.between_nodes + self.replica_buffer
        return self.ids + self.allocated + shared


def take_steps(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    samples: int,
    accumulated: int,
    library: str | None,
    nodes: Any = None,
    nvshmem: str = "",
) -> Taken:
    """Steps with batches prepared ahead, as pipelines have them; of a plan for inference, lookups.
    Then so many batches whose gradients are accumulated. `nvshmem`: the library of its fake, where
    nodes are joined by it."""
    ids = outputs = outbox = 0
    device = device_of(library)
    if nvshmem:
        assert library is not None
        device = EmulatedDevice(library, nvshmem, nodes[rank])
    with shared_memory() as asked:
        engine = EmbeddingEngine(
            plan, module_tables(case), group=group, weighted=case.weighted, deadline_seconds=60,
            device=device, nodes=nodes,
        )  # fmt: skip
        batches = [batch_of(case, device, step, rank, samples) for step in range(STEPS)]
        with measured(device) as preparing:
            first = engine.prepare(batches[0])
        del first
        prepared: deque[Any] = deque()
        with measured(device) as peak, nullcontext() if engine.training else torch.no_grad():
            for batch in (*batches, *[None] * BATCHES_AHEAD):
                if batch is not None:
                    prepared.append(engine.prepare(batch))
                if batch is not None and len(prepared) <= BATCHES_AHEAD:
                    continue
                out = engine.lookup(prepared.popleft())
                outputs = max(outputs, out.nbytes)
                if engine.training:
                    out.backward(torch.ones((), device=out.device).expand_as(out).contiguous())
                del out
        ids = sum(batch.values().nbytes for batch in batches)
        held = []
        for batch in batches * -(-accumulated // len(batches)):
            with engine.accumulate():
                out = engine(batch)
                out.backward(torch.ones_like(out))
            assert isinstance(engine.gradients, Gradients)
            assert engine.gradients._held is not None
            sums = engine.gradients._held.sums
            held.append(sum(part.untyped_storage().nbytes() for part in (sums.slots, sums.values)))
    replicas: list[int] = []
    allreduce = getattr(engine.gradients, "_replicas", None)
    if isinstance(allreduce, ReplicaAllReduce):
        replicas = allreduce._method._replicas.counts  # type: ignore[attr-defined]
    if (symmetric := engine._memory.symmetric) is not None:
        outbox = symmetric._outbox.nbytes
    engine.close()
    return Taken(
        preparing=preparing.bytes,
        ids=ids,
        # The output of a lookup, and its gradient.
        allocated=peak.bytes - (2 if engine.training else 1) * outputs,
        mailbox=asked("gradient_mailbox"),
        between_nodes=asked("device_slots") + outbox,
        replica_buffer=asked("device_sliced_sum") + asked("device_allgather"),
        replicas=list(replicas),
        held=held,
    )
