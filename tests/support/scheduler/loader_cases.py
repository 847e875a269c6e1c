"""What ranks do in the tests of DispatchingLoader."""

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import oper
from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import tables_of
from tests.support.runtime.mortal_ranks import lose_this_process
from tests.support.runtime.runtime_plans import random_plan
from tests.support.scheduler.loader_batches import TABLES, batch, samples_of
from tests.support.torchrec.models import Model, Reference
from tests.support.torchrec.models import batch as model_batch
from tests.support.torchrec.ranks import (
    DENSE_LR,
    LR,
    compare,
    reference_state,
    sharded,
    train_step,
    whole_model,
)

SAMPLES = 6  # of a rank
SETTINGS: dict[str, Any] = {"deterministic": True, "cache": CacheSettings("70%")}


def plan_of(ranks: int, seed: int = 1) -> Any:
    """A plan with replicas, listed and striped rows."""
    return random_plan(seed, TABLES, ranks)


def own_batches(
    rank: int, ranks: int, steps: int, structure: str = "tuple", bags: bool = True
) -> list[Any]:
    """What a rank's loader yields: of each global batch its SAMPLES samples."""
    firsts = [(step * ranks + rank) * SAMPLES for step in range(steps)]
    return [batch(structure, first, SAMPLES, bags) for first in firsts]


def make(rank: int, group: Any, own: Any, **settings: Any) -> oper.DispatchingLoader:
    """A loader of a group's ranks over a rank's `own` batches."""
    plan = settings.pop("plan", None) or plan_of(dist.get_world_size(group))
    return oper.DispatchingLoader(own, plan, group=group, **SETTINGS | settings)


def dispatched(
    rank: int, group: Any, steps: int, structure: str, epochs: int = 1, **settings: Any
) -> tuple[list[list[Any]], dict[str, Any]]:
    """The samples of each batch that a rank trains, and its counters."""
    bags = settings.pop("bags", True)
    own = own_batches(rank, dist.get_world_size(group), steps, structure, bags)
    loader = make(rank, group, own, **settings)
    found = [samples_of(given) for _ in range(epochs) for given in loader]
    return found, loader.counters.to_dict()


def kinds(rank: int, group: Any, structure: str) -> None:
    """What is yielded has the types of what the loader yielded."""
    own = own_batches(rank, dist.get_world_size(group), 1, structure)
    (found,) = make(rank, group, own, policy="random")
    assert type(found) is type(own[0])
    _compare_kinds(found, own[0])


def _compare_kinds(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    if hasattr(given, "dtype"):
        assert found.dtype == given.dtype
    if hasattr(given, "keys") and hasattr(given, "stride"):
        assert found.keys() == given.keys()
        assert found.stride() == given.stride()
        assert found.lengths().dtype == given.lengths().dtype
    elif isinstance(given, dict):
        assert list(found) == list(given)
        for key, value in given.items():
            _compare_kinds(found[key], value)
    elif isinstance(given, tuple | list):
        for mine, its in zip(found, given, strict=True):
            _compare_kinds(mine, its)
    elif hasattr(given, "__dataclass_fields__"):
        for name in given.__dataclass_fields__:
            _compare_kinds(getattr(found, name), getattr(given, name))
    elif isinstance(given, str | int | float | None):
        assert found == given


def failing(rank: int, group: Any, what: str) -> str:
    """The error that a rank raises, after how many batches."""
    ranks = dist.get_world_size(group)
    own: Any = own_batches(rank, ranks, 4)
    settings: dict[str, Any] = {}
    last = rank == ranks - 1
    if what == "lengths" and last:
        own = own[:2]
    elif what in ("ragged", "ragged, dropped", "ragged in the middle") and last:
        at = 1 if "middle" in what else 3
        own[at] = batch("tuple", 1000, SAMPLES - 2)
    elif what == "empty" and last:
        own[3] = batch("tuple", 1000, 0)
    elif what == "empty first":
        own = [batch("tuple", 0, 0)]
    elif what in ("one fewer, dropped", "two fewer, dropped") and last:
        own = own[: -1 if what.startswith("one") else -2]
    elif what == "raises" and last:
        own = _raising(own)
    elif what == "text":
        own = [(given, f"of rank {rank}") for given in own]
    elif what == "structure" and last:
        own = [given[:2] for given in own]
    elif what == "type" and last:
        own = [(given[0], np.array(["a"] * SAMPLES)) for given in own]
    elif what == "no samples" and last:
        own = [(given[0], torch.ones(2)) for given in own]
    elif what == "feature":
        settings["features"] = {"wide": ["h"]}
    elif what == "settings" and last:
        settings["seed"] = 3
    elif what == "plan" and last:
        settings["plan"] = plan_of(ranks, 5)
    elif what == "other ranks":
        settings["plan"] = plan_of(ranks + 1)
    elif what == "small cache":
        settings["cache"] = CacheSettings("0.1%")
    if "dropped" in what or "middle" in what:
        settings["drop_last"] = True
    seen = 0
    try:
        loader = make(rank, group, own, policy="esd" if "cache" in what else "locality", **settings)
        for _ in loader:
            seen += 1
    except (OperError, ZeroDivisionError) as error:
        return f"after {seen}: {type(error).__name__}: {error}"
    return f"after {seen}: ended"


def come_and_go_of_some(rank: int, group: Any) -> int:
    """Loaders of two of three ranks, one after another; rank 1 keeps those that rank 0 drops."""
    if rank == 1:  # as many groups as rank 0 has: torch names groups of some ranks by that
        dist.new_group([1], use_local_synchronization=True)
    some = dist.new_group([0, 1])
    if rank == 2:
        return 0
    kept, batches = [], 0
    for _ in range(3):
        loader = make(rank, some, own_batches(rank, 2, 2), deadline_seconds=5.0)
        batches += sum(1 for _ in loader)
        if rank == 1:
            kept.append(loader)
        del loader
        gc.collect()
    return batches


def _raising(own: list[Any]) -> Iterator[Any]:
    yield own[0]
    raise ZeroDivisionError("a worker of the loader died")


def one_seed_differs(rank: int, group: Any, policy: str) -> str:
    """The error where one rank computes another assignment."""
    own = own_batches(rank, dist.get_world_size(group), 3)
    loader = make(rank, group, own, policy=policy)
    if rank == 1:
        assigner: Any = loader._state.assigner
        getattr(assigner, "_dispatcher", assigner).__dict__["_seed" if policy == "random" else
                                                           "seed"] = 99  # fmt: skip
    try:
        list(loader)
    except OperError as error:
        return str(error)
    return ""


def leaves_and_comes_again(rank: int, group: Any) -> tuple[list[Any], int]:
    """A loop that all ranks leave, then one to the end; the second loop's labels, and how many
    threads there are more than before."""
    before = threading.active_count()
    loader = make(rank, group, own_batches(rank, dist.get_world_size(group), 8), policy="locality")
    for seen, _ in enumerate(loader):
        if seen == 2:
            break
    after = threading.active_count() - before
    return [sample[-1] for given in loader for sample in samples_of(given)], after


def one_leaves(rank: int, group: Any) -> str:
    """The error of the other ranks where one leaves its loop; that one may go on without."""
    loader = make(rank, group, own_batches(rank, dist.get_world_size(group), 8), policy="locality")
    try:
        for seen, _ in enumerate(loader):
            if seen == 1 and rank == 1:
                break
    except OperError as error:
        return str(error)
    return "left"


def dies(rank: int, group: Any, kind: str) -> Any:
    """One rank dies, or stops, in its loop; the seconds until the others know."""
    loader = make(
        rank, group, own_batches(rank, dist.get_world_size(group), 50), policy="locality",
        deadline_seconds=3.0,
    )  # fmt: skip
    lost = time.monotonic()
    try:
        for seen, _ in enumerate(loader):
            if seen == 3:
                lost = time.monotonic()
                if rank == 1:
                    lose_this_process(signal.SIGKILL if kind == "dies" else signal.SIGSTOP)
            time.sleep(0.01)
    except OperError as error:
        return str(error), time.monotonic() - lost
    return "ended", 0.0


def trained(rank: int, group: Any, policy: str, pipelined: bool = False) -> int:
    """A sharded model on dispatched samples, against one process on the same global batches; the
    samples that the rank moved."""
    ranks = dist.get_world_size(group)
    batches = [[model_batch(100 * step + r) for r in range(ranks)] for step in range(4)]
    model, optimizer = sharded(group, "rowwise_adagrad")
    reference = Reference(Model("cpu"), "rowwise_adagrad", LR, DENSE_LR)
    plan = random_plan(0, tables_of(Model("meta")), ranks, replicated=0.3)
    own = [of_step[rank] for of_step in batches]
    loader = oper.DispatchingLoader(
        own, plan, policy=policy, group=group, cache=CacheSettings("90%")
    )
    if pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        iterator = iter(loader)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(iterator)
    else:
        for inputs in loader:
            train_step(model, optimizer, inputs)
    for of_step in batches:
        reference.step(of_step)
    found = whole_model(model, group)
    compare(found, reference_state(reference), 1e-4)
    return loader.counters.samples_moved


def paced(rank: int, group: Any, policy: str) -> list[float]:
    """The effort of each batch, where rank 0 has no time for dispatch."""
    heard: list[float] = []
    own = own_batches(rank, dist.get_world_size(group), 30)
    loader = make(rank, group, own, policy=policy, deterministic=False)
    original = loader._state.pace.hear

    def hear(effort: float) -> float:
        heard.append(original(effort))
        return heard[-1]

    loader._state.pace.hear = hear  # type: ignore[method-assign]
    for _ in loader:  # nothing is trained: dispatch always takes longer
        pass
    return heard


class DyingDataset(Dataset[Any]):
    """Samples of which the tenth ends the process that makes it."""

    def __len__(self) -> int:
        return 8 * SAMPLES

    def __getitem__(self, number: int) -> int:
        if number == 10:
            lose_this_process(signal.SIGKILL)
        return number


def a_worker_dies(rank: int, group: Any) -> str:
    """The error where a process of one rank's loader dies, which torch looks for every five seconds
    otherwise."""
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)
    own: Any = own_batches(rank, 2, 8)
    if rank == 1:
        own = DataLoader(DyingDataset(), SAMPLES, num_workers=1, collate_fn=_batch_of)
    try:
        for _ in make(rank, group, own, policy="random"):
            pass
    except (OperError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def _batch_of(numbers: list[int]) -> Any:
    return batch("tuple", numbers[0], len(numbers))
