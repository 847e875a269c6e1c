"""A whole DLRM step on one device: TorchRec with FBGEMM against OPER, eager and as a graph.

26 tables of 400,000 rows, dim 64, row-wise Adagrad; dense layers 512-256-64 and 512-256-1 with SGD.
The host's clock times steps back to back. All sides start from TorchRec's weights. `failed` means
that OPER's losses of the first steps differ from TorchRec's, or that no graph was captured.
"""

from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 60.0
NEEDS = ("torch", "numpy", "torchrec", "fbgemm_gpu", "msgspec", "yaml")
FIRST_STEPS = 4  # whose losses are compared


def records(library: str | None) -> Iterator[dict[str, Any]]:
    from scripts.gpu_check import dlrm_case
    from tests.support.cuda.torchrec_cases import place_of

    sizes = dlrm_case.Sizes() if library is None else dlrm_case.DRY
    with dlrm_case.process_group(place_of(library)) as group:
        for samples in sizes.batches:
            yield from measure(library, sizes, samples, group)


def measure(library: str | None, sizes: Any, samples: int, group: Any) -> Iterator[dict[str, Any]]:
    """Yield the time of each side's step for batches of so many samples."""
    import torch
    from torchrec.distributed.types import ShardingEnv

    import oper
    from scripts.gpu_check import dlrm_case
    from scripts.gpu_check.timing import timed_steps
    from tests.support.cuda.device_engines import device_of
    from tests.support.cuda.torchrec_cases import on_device, place_of

    place, device = place_of(library), device_of(library)
    batches = dlrm_case.draw_batches(sizes, samples, place)
    by_torchrec = shard_by_torchrec(dlrm_case.make_dlrm(sizes), place, samples, group)
    plan = dlrm_case.make_plan(dlrm_case.make_dlrm(sizes), batches, dlrm_case.topology_of(device))
    env = ShardingEnv.from_process_group(group)

    def ours() -> Any:
        with on_device(library):
            made = oper.shard(dlrm_case.make_dlrm(sizes), plan, env=env, device=place)
        made.load_state_dict(by_torchrec.state_dict())
        return made

    eager, graphed = ours(), ours()
    steps = {name: step_of(m) for name, m in (("TorchRec", by_torchrec), ("OPER", eager))}
    as_graph = oper.graph_step(graphed, step_of(graphed))
    losses = {
        name: [float(step(batch)) for batch in batches[:FIRST_STEPS]]
        for name, step in steps.items()
    }
    for number in range(dlrm_case.UNTIL_CAPTURED):
        as_graph(batches[number % len(batches)])
    steps["OPER, as a graph"] = as_graph
    of_torchrec, of_oper = (torch.tensor(losses[name]) for name in ("TorchRec", "OPER"))
    same = bool(torch.allclose(of_torchrec, of_oper, rtol=1e-3, atol=1e-4))
    times = timed_steps(steps, batches, device.synchronize, rounds=sizes.rounds)
    for name, time in times.items():
        yield {
            "samples": samples,
            "side": name,
            "step_seconds": time.seconds,
            "spread": time.spread,
            "samples_per_second": samples / time.seconds,
            "times_torchrec": times["TorchRec"].seconds / time.seconds,
            "captured": as_graph.captured if name not in losses else None,
            "failed": not (same if name in losses else as_graph.captured),
        }
    as_graph.release()


def shard_by_torchrec(model: Any, place: Any, samples: int, group: Any) -> Any:
    """Shard the model by TorchRec: each table whole, by FBGEMM's fused kernel."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType

    constraint = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    configs = model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    sharder: Any = EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=place.type),
        batch_size=samples,
        constraints={config.name: constraint for config in configs},
    )
    plan = planner.collective_plan(model, [sharder], group)
    return DistributedModelParallel(model, device=place, plan=plan, sharders=[sharder])


def step_of(model: Any) -> Callable[[Any], Any]:
    """Return the training step of a sharded DLRM, which returns its loss."""
    import torch
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from scripts.gpu_check.dlrm_case import LEARNING_RATE

    model.train()
    dense = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        logits = model(batch.dense, batch.ids).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
