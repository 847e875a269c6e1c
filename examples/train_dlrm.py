"""Train a small DLRM by OPER's plan, and for comparison by TorchRec's own, on the same ranks.

    oper synth criteo-kaggle --scale 0.01 --samples 200000 -o log.parquet
    oper profile log.parquet --tables log.tables.yaml -o profile
    oper plan profile --topology cpu:2 --batch-size 8192 -o plan
    python examples/train_dlrm.py log.parquet plan --counters counters.json
    oper report plan --profile profile --counters counters.json -o plan.html

The last command starts the plan's ranks on this host; so does
torchrun --nproc-per-node 2 examples/train_dlrm.py …
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torchrun
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper

DENSE_FEATURES = 13


def make_dlrm(plan: oper.Plan) -> nn.Module:
    """An ordinary TorchRec model, without memory for its tables until it is sharded."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.columns),
        )
        for table in plan.tables
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.02})
    return DLRM(
        tables,
        dense_in_features=DENSE_FEATURES,
        dense_arch_layer_sizes=[64, configs[0].embedding_dim],
        over_arch_layer_sizes=[64, 1],
    )


def batches(
    log: str, folder: str, plan: oper.Plan
) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
    """Yield this rank's part of every batch: dense values, ids, labels.

    All ranks take equally many steps: what is left at the log's end, less than a batch, is dropped.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size, mine = samples_of_a_rank(plan, ranks), None
    for number, part in enumerate(oper.read(log, plan.tables, folder=folder, batch_size=size)):
        if part.samples < size:
            return
        if number % ranks == rank:
            mine = part
        if number % ranks == ranks - 1:
            assert mine is not None, "this rank's part came before the last one's"
            yield torch.tensor(mine.dense), mine.to_kjt(), torch.tensor(mine.label)


def samples_of_a_rank(plan: oper.Plan, ranks: int) -> int:
    """Return the samples that a rank trains of each of the plan's batches."""
    return max(plan.workload.batch_size // ranks, 1)


def check_log(log: str, folder: str, plan: oper.Plan, ranks: int) -> None:
    """End the script if the log has no whole batch, so that no rank has a step to take."""
    samples = samples_of_a_rank(plan, ranks) * ranks
    first = next(iter(oper.read(log, plan.tables, folder=folder, batch_size=samples)), None)
    found = 0 if first is None else first.samples
    if found < samples:
        sys.exit(
            f"{log}: expected at least {samples:,} samples, a batch of {folder}, got {found:,}; "
            "give a longer log, or plan with a smaller --batch-size"
        )


def optimizer_of(model: nn.Module) -> CombinedOptimizer:
    """Return the optimizer of tables and layers.

    TorchRec leaves the tables that its plan has data-parallel, on all ranks, to the script: they
    get the row-wise Adagrad of the others, so that the same model is trained by both plans.
    """
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    copies = {name: left.pop(name) for name in [*left] if ".embedding_bags." in name}
    parts = [
        model.fused_optimizer,
        KeyedOptimizerWrapper(left, lambda layers: torch.optim.Adagrad(layers, lr=0.02)),
    ]
    if copies:
        parts.append(KeyedOptimizerWrapper(copies, lambda rows: RowWiseAdagrad(rows, lr=0.02)))
    return CombinedOptimizer(parts)


def start_alike(source: nn.Module, target: nn.Module) -> None:
    """Give a model the values of another one, whose tables are sharded in another way."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    save(source.state_dict(), checkpoint_id=folder[0])
    state = target.state_dict()
    load(state, checkpoint_id=folder[0])  # it writes into the model's own tensors
    target.load_state_dict(state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))


def train(model: nn.Module, log: str, folder: str, plan: oper.Plan) -> tuple[float, list[float]]:
    """Train one pass over the log; return the median milliseconds of a step, and the losses."""
    optimizer = optimizer_of(model)
    milliseconds, losses = [], []
    for dense, ids, labels in batches(log, folder, plan):
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(dense, ids).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        milliseconds.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    return statistics.median(milliseconds), losses


def print_traffic(model: nn.Module, plan: oper.Plan) -> None:
    """Bytes of a step between this rank and the others: as the plan predicts them for the average
    rank, and as they were counted."""
    (counted,) = oper.counters(model).values()
    rank, ranks, steps = dist.get_rank(), plan.ranks, counted["steps"]
    away = [other for other in range(ranks) if other != rank]
    found = {
        "fetch": sum(counted["fetched_bytes"][other] for other in away) / steps,
        "gradient": sum(counted["gradient_bytes"][other] for other in away) / steps,
        "allreduce": counted["allreduce_bytes"] / steps,
    }
    print(f"rank {rank}, kB of a step:   predicted   counted")
    for name, bytes_found in found.items():
        predicted = getattr(plan.cost.communication_bytes, name) / ranks
        print(f"  {name:<22}{predicted / 1e3:>10.1f}{bytes_found / 1e3:>10.1f}")


def save_counters(model: nn.Module, path: str) -> None:
    """Save the counters of all ranks, in their order, for `oper report --counters`."""
    every: list[dict[str, Any]] | None = None
    if dist.get_rank() == 0:
        every = [{}] * dist.get_world_size()
    dist.gather_object(oper.counters(model), every)
    if every is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(every, file)


def quiet() -> None:
    """Hide the warnings that torch and TorchRec raise in their own calls."""
    warnings.filterwarnings("ignore", module="torch")
    for name in (None, "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("log")
    options.add_argument("plan", help="made by `oper plan` from a profile of the log")
    options.add_argument("--counters", help="a file for what the ranks counted, of OPER's plan")
    given = options.parse_args()
    plan = oper.Plan.load(given.plan)
    check_log(given.log, given.plan, plan, int(os.environ.get("WORLD_SIZE", plan.ranks)))
    if "RANK" not in os.environ:  # not under torchrun: start it, for the plan's ranks on this host
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        started = ["--standalone", f"--nproc-per-node={plan.ranks}", __file__, *sys.argv[1:]]
        torchrun.main(started)
        return
    quiet()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same layers on all ranks
    by_oper = oper.shard(make_dlrm(plan), plan)
    by_torchrec = DistributedModelParallel(make_dlrm(plan), device=torch.device("cpu"))
    start_alike(by_oper, by_torchrec)
    losses = []
    for name, model in (("OPER", by_oper), ("TorchRec's plan", by_torchrec)):
        milliseconds, found = train(model, given.log, given.plan, plan)
        losses.append(found)
        if dist.get_rank() == 0:
            loss = statistics.mean(found[-10:])
            print(f"{name:<16}{milliseconds:8.2f} ms a step, log loss {loss:.4f}")
    if dist.get_rank() == 0:
        apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
        print(
            "Both start from the same values and train the same batches. Their losses differ by at "
            f"most {apart:.0e}, because float sums have another order"
        )
        print_traffic(by_oper, plan)
    if given.counters is not None:
        save_counters(by_oper, given.counters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
