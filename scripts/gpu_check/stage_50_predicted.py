"""The measured step of the tables against the step that plans predict for this device.

It is the DLRM's collection alone, on one rank, with the preset of this device. Predictions have
memory traffic and the latency of each phase, without the host's own work.
"""

from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 25.0
NEEDS = ("torch", "numpy", "torchrec", "fbgemm_gpu", "msgspec", "yaml")


def records(library: str | None) -> Iterator[dict[str, Any]]:
    import torch
    from torchrec.distributed.types import ShardingEnv

    import oper
    from scripts.gpu_check import dlrm_case
    from scripts.gpu_check.timing import timed_steps
    from tests.support.cuda.device_engines import device_of
    from tests.support.cuda.torchrec_cases import on_device, place_of

    place, device = place_of(library), device_of(library)
    sizes = dlrm_case.Sizes() if library is None else dlrm_case.DRY
    topology = dlrm_case.topology_of(device)
    for samples in sizes.batches:
        batches = dlrm_case.draw_batches(sizes, samples, place)
        module = dlrm_case.make_collection(sizes)
        plan = dlrm_case.make_plan(module, batches, topology)
        with on_device(library):
            model = oper.shard(module, plan, env=ShardingEnv.from_local(1, 0), device=place)
        gradient = 1e-3 * torch.randn(samples, dlrm_case.TABLES * dlrm_case.DIM, device=place)

        def step(batch: Any, model: Any = model, gradient: Any = gradient) -> None:
            model(batch.ids).values().backward(gradient)

        as_graph = oper.graph_step(model, step)
        for number in range(dlrm_case.UNTIL_CAPTURED):
            as_graph(batches[number % len(batches)])
        versions: dict[str, Callable[[Any], object]] = {"eager": step, "as a graph": as_graph}
        assert plan.step_time is not None
        predicted = plan.step_time.seconds
        times = timed_steps(versions, batches, device.synchronize, rounds=sizes.rounds)
        for name, time in times.items():
            yield {
                "samples": samples,
                "preset": topology.name,
                "step": name,
                "measured_seconds": time.seconds,
                "spread": time.spread,
                "predicted_seconds": predicted,
                "error_percent": 100 * (predicted / time.seconds - 1),
            }
        as_graph.release()
