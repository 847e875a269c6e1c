"""TorchRec's EmbeddingShardingPlanner in a process of its own: JSON in, its plans as JSON out.

    python -m oper.planner.baselines.torchrec_process < request.json > answers.jsonl

It has a process of its own because importing torchrec takes seconds, and so that a plan that takes
too long can be ended cleanly. When all is imported and the model is built it writes the line
`READY`, from which on its time counts, and then a line for each plan that it finds. If no plan fits
the capacities, the least multiple of them at which one is found is bracketed by doubling and then
narrowed by bisection to 5 %: each line is of a smaller multiple than the one before.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchrec.optim
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    PlannerError,
    ShardingOption,
    Stats,
)
from torchrec.modules.embedding_configs import DataType

from oper.base import process_signals
from oper.planner.baselines.torchrec_planner import READY

LARGEST_FACTOR = 1024.0
PRECISION = 1.05

# Optimizers that TorchRec's storage estimate tells apart; the others count as one state of the
# row's size.
OPTIMIZERS = {
    "none": None,
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
DTYPES = {
    "fp32": DataType.FP32,
    "fp16": DataType.FP16,
    "bf16": DataType.BF16,
    "int8": DataType.INT8,
}


class DeviceMemorySharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """All shardings, in device memory: no table is left in the host's behind a cache."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernel = EmbeddingComputeKernel
        if sharding_type == "data_parallel":
            return [kernel.DENSE.value]
        return [kernel.FUSED.value]


class KeepBest(Stats):  # type: ignore[misc]
    """Keeps the planner's own estimate of its plan, in place of its report."""

    def __init__(self) -> None:
        self.seconds = math.nan

    def log(self, *, best_plan: list[ShardingOption], **others: Any) -> None:
        per_rank: dict[int | None, float] = {}
        for option in best_plan:
            for shard in option.shards:
                if shard.perf is not None:
                    per_rank[shard.rank] = per_rank.get(shard.rank, 0.0) + shard.perf.total
        self.seconds = max(per_rank.values()) / 1e3  # it counts in milliseconds


def make_module(tables: list[dict[str, Any]]) -> Any:
    """Build the tables on the meta device: shapes without memory."""
    configs = [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["dim"],
            feature_names=table["features"],
            data_type=DTYPES[table["dtype"]],
        )
        for table in tables
    ]
    module: Any = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for table in tables:
        optimizer = OPTIMIZERS.get(table["optimizer"], torch.optim.Adagrad)
        module.embedding_bags[table["name"]].weight._optimizer_classes = [optimizer]
    return module


def make_topology(request: dict[str, Any], factor: float) -> Topology:
    """Return the ranks with `factor` times their capacities."""
    ranks = request["ranks"]
    capacities = [int(capacity * factor) for capacity in request["capacities"]]
    return Topology(
        world_size=ranks,
        local_world_size=request["ranks_per_node"],
        compute_device="cuda",
        hbm_cap=max(capacities),
        ddr_cap=0,
        custom_topology_data=CustomTopologyData(
            {"hbm_cap": capacities, "ddr_cap": [0] * ranks}, ranks
        ),
        # TorchRec counts bytes per millisecond.
        hbm_mem_bw=request["local_bandwidth"] / 1e3,
        intra_host_bw=request["same_node_bandwidth"] / 1e3,
        inter_host_bw=request["other_node_bandwidth"] / 1e3,
    )


def plan_once(request: dict[str, Any], module: Any, factor: float) -> dict[str, Any] | None:
    """Return TorchRec's plan for a module with `factor` times the capacities; None if it finds
    none. `seconds` is the time of its planner's `plan` alone."""
    inference = request["mode"] == "inference"
    topology = make_topology(request, factor)
    constraints = {
        table["name"]: ParameterConstraints(pooling_factors=table["pooling_factors"])
        for table in request["tables"]
    }
    stats = KeepBest()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request["batch_size_per_rank"],
        enumerator=EmbeddingEnumerator(
            topology=topology,
            batch_size=request["batch_size_per_rank"],
            constraints=constraints,
            estimator=[
                EmbeddingPerfEstimator(topology, constraints, is_inference=inference),
                EmbeddingStorageEstimator(topology, constraints, is_inference=inference),
            ],
        ),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        stats=stats,
    )
    started = time.perf_counter()
    try:
        plan = planner.plan(module, [DeviceMemorySharder()])
    except PlannerError:
        return None
    seconds = time.perf_counter() - started
    shards = []
    for per_table in plan.plan.values():
        assert isinstance(per_table, dict)
        for name, sharding in per_table.items():
            spec = sharding.sharding_spec
            placed = spec.shards if spec is not None else [None] * len(sharding.ranks)
            for rank, shard in zip(sharding.ranks, placed, strict=True):
                shards.append(
                    {
                        "table": name,
                        "sharding": sharding.sharding_type,
                        "rank": rank,
                        "offsets": list(shard.shard_offsets) if shard else None,
                        "sizes": list(shard.shard_sizes) if shard else None,
                    }
                )
    return {
        "shards": shards,
        "capacity_factor": factor,
        "estimate_seconds": stats.seconds,
        "seconds": seconds,
    }


def least_factor(
    attempt: Callable[[float], dict[str, Any] | None],
) -> dict[str, Any] | None:
    """Return the first success at 1, or within 5 % of the least factor that succeeds; None past
    1024."""
    low, high = 1.0, 1.0
    answer = attempt(high)
    while answer is None:
        low, high = high, 2 * high
        if high > LARGEST_FACTOR:
            return None
        answer = attempt(high)
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        closer = attempt(middle)
        if closer is None:
            low = middle
        else:
            answer, high = closer, middle
    return answer


def main() -> None:
    logging.disable(logging.CRITICAL)
    request = json.load(sys.stdin)
    process_signals.end_with(request["parent"])
    module = make_module(request["tables"])
    print(READY, flush=True)

    def attempt(factor: float) -> dict[str, Any] | None:
        answer = plan_once(request, module, factor)
        if answer is not None:
            print(json.dumps(answer), flush=True)
        return answer

    least_factor(attempt)


if __name__ == "__main__":
    main()
