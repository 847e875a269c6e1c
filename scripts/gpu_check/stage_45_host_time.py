"""The host's time for a batch: to prepare, look up and train it, and to run the step as a graph.

An engine of one rank looks up one id of each of 26 and of 856 tables a sample. The device is idle
when a batch begins, so that the host never waits for a queue. `step_seconds` and
`graph_step_seconds` are from there to the end of the device's work. `waits` lists the lines at
which the host waits for the device.
"""

import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 15.0
NEEDS = ("torch", "numpy", "msgspec", "yaml")
TABLES, SAMPLES, ROUNDS = (26, 856), 2048, 50
WARM = 3  # rounds that are not counted: kernels load and memory is allocated in them
LISTED = 12  # functions of a profile, which have nearly all of its time


def records(library: str | None) -> Iterator[dict[str, Any]]:
    sizes = (TABLES, SAMPLES, ROUNDS) if library is None else (TABLES[:1], 8, 2)
    for tables in sizes[0]:
        medians, profiles = measure(library, tables, *sizes[1:])
        yield {"tables": tables, "samples": sizes[1], **medians}
        for what, functions in profiles.items():
            for function, seconds in functions:
                of = {"tables": tables, "of": what, "function": function}
                yield {**of, "profiled_seconds": seconds}


def measure(
    library: str | None, tables: int, samples: int, rounds: int
) -> tuple[dict[str, Any], dict[str, list[tuple[str, float]]]]:
    """Return medians of host seconds with the lines where one batch waits for the device, and the
    functions that take most of a step and of a step that is a graph."""
    import torch

    from oper.runtime.engine import EmbeddingEngine
    from oper.runtime.step_graph import StepGraph
    from tests.support.cuda.device_engines import device_of
    from tests.support.cuda.plain_batch import PlainBatch
    from tests.support.runtime.engine_cases import Case, module_tables, tables_of
    from tests.support.runtime.runtime_plans import random_plan

    on = device_of(library)
    case = Case(1, 1, rows=(1000,) * tables, dims=(64,))
    plan = random_plan(1, tables_of(case), 1)
    engine = EmbeddingEngine(plan, module_tables(case), device=on)
    keys = [feature for table in module_tables(case) for feature in table.features]
    ids = torch.randint(0, 1000, (samples * len(keys),), device=on.torch_device)
    ends = torch.arange(samples * len(keys) + 1, device=on.torch_device)
    prepare, lookup, train = [], [], []
    for _ in range(rounds + WARM):
        batch = PlainBatch(keys, ids, None, samples, offsets=ends)
        on.synchronize()
        began = time.perf_counter()
        prepared = engine.prepare(batch)
        between = time.perf_counter()
        out = engine.lookup(prepared)
        looked_up = time.perf_counter()
        prepare.append(between - began)
        lookup.append(looked_up - between)
        grad = torch.ones_like(out)
        on.synchronize()
        began = time.perf_counter()
        out.backward(grad)
        train.append(time.perf_counter() - began)

    def step() -> None:
        engine(batch).sum().backward()

    medians = {
        "prepare_seconds": statistics.median(prepare[WARM:]),
        "lookup_seconds": statistics.median(lookup[WARM:]),
        "train_seconds": statistics.median(train[WARM:]),
        "waits": waits_of(step) if library is None else None,
        "step_seconds": statistics.median(timed(step, on.synchronize, rounds)[1]),
    }
    profiles = {"step": profile_of(step, on.synchronize, rounds)}
    captured = StepGraph([engine], step)
    on_host, to_the_end = timed(captured.run, on.synchronize, rounds)
    medians["graph_seconds"] = statistics.median(on_host)
    medians["graph_step_seconds"] = statistics.median(to_the_end)
    profiles["graph"] = profile_of(captured.run, on.synchronize, rounds)
    engine.close()
    return medians, profiles


def profile_of(
    work: Callable[[], object], wait: Callable[[], object], rounds: int
) -> list[tuple[str, float]]:
    """Return the functions that take the host most of the time of `work`, and their seconds per
    call of it. The profiler adds to the seconds; only the order is reliable."""
    profile = cProfile.Profile()
    for _ in range(rounds):
        wait()
        profile.enable()
        work()
        profile.disable()
    stats: Any = pstats.Stats(profile)
    of = {
        f"{Path(file).name}:{name}": own_seconds
        for (file, _, name), (_, _, own_seconds, *_) in stats.stats.items()
    }
    slowest = sorted(of.items(), key=lambda function: -function[1])[:LISTED]
    return [(function, seconds / rounds) for function, seconds in slowest]


def timed(
    work: Callable[[], object], wait: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the host's seconds for `work`, and the seconds until the device is done, per round."""
    on_host, to_the_end = [], []
    for _ in range(rounds + WARM):
        wait()
        began = time.perf_counter()
        work()
        on_host.append(time.perf_counter() - began)
        wait()
        to_the_end.append(time.perf_counter() - began)
    return on_host[WARM:], to_the_end[WARM:]


def waits_of(work: Any) -> list[str]:
    """Return the lines at which torch sees the host wait for the device in `work`."""
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in told if "synchroniz" in str(warning.message)]
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]
