"""Train a small DLRM that outlives its ranks: one is killed, or the next start has more or fewer.

    oper synth criteo-kaggle --scale 0.001 --samples 100000 -o log.parquet
    oper profile log.parquet --tables log.tables.yaml -o profile
    torchrun --standalone --max-restarts 3 --nproc-per-node 2 \\
        examples/elastic.py log.parquet profile run

Kill one of the processes that it names, and torchrun starts all ranks anew; stop it, and start it
with another --nproc-per-node. Either way it takes the newest checkpoint in `run`, plans again for
the ranks that there are, and trains on. Global batches are the same on any number of ranks: losses
go on to the bit on as many, and to the rounding of other sums on others.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper

DENSE_FEATURES = 13
BATCH = 3_072  # samples of all ranks together, of which each has an equal part
SAVE_EVERY = 5  # steps


def join_ranks() -> None:
    """Make the process group of the ranks that torchrun started. Those of an earlier start left
    their addresses in its store, which gloo would take for these ranks'."""
    store, rank, ranks = next(rendezvous("env://"))
    store = PrefixStore("start " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def plan_for_these_ranks(run: Path, profile: str) -> oper.Plan:
    """The plan for as many ranks as there are, made from one for others if there is one."""
    ranks = dist.get_world_size()
    wanted, topology = run / f"plan-{ranks}", oper.Topology.load(f"cpu:{ranks}")
    if dist.get_rank() == 0 and not wanted.exists():
        older = max(run.glob("plan-*"), key=os.path.getmtime, default=None)
        if older is None:
            workload = oper.Workload("training", "raw", BATCH)
            made = oper.make_plan(oper.Profile.load(profile), topology, workload)
        else:
            made = oper.replan(older, profile, 100_000, topology=topology).plan
        made.save(wanted)
    dist.barrier()
    return oper.Plan.load(wanted)


def make_model(plan: oper.Plan) -> DistributedModelParallel:
    """A DLRM, its tables where the plan has them."""
    torch.manual_seed(0)  # the same layers on all ranks
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
    dlrm = DLRM(
        tables,
        dense_in_features=DENSE_FEATURES,
        dense_arch_layer_sizes=[64, configs[0].embedding_dim],
        over_arch_layer_sizes=[64, 1],
    )
    return DistributedModelParallel(
        dlrm,
        device=torch.device("cpu"),
        plan=oper.torchrec_plan(plan, dlrm),
        sharders=[oper.OperEmbeddingBagCollectionSharder(plan)],
        # Its buckets stay, so that a job that goes on sums dense gradients in the same order.
        data_parallel_wrapper=DefaultDataParallelWrapper(
            static_graph=False, find_unused_parameters=True
        ),
    )


def batches(
    log: str, folder: str, plan: oper.Plan, first: int
) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
    """This rank's part of every global batch, from number `first` on: dense values, ids, labels."""
    ranks, size = dist.get_world_size(), BATCH // dist.get_world_size()
    parts = oper.read(log, plan.tables, folder=folder, batch_size=size, rows=f"{first * BATCH}:")
    for number, part in enumerate(parts):
        if number % ranks == dist.get_rank() and part.samples == size:
            yield torch.tensor(part.dense), part.to_kjt(), torch.tensor(part.label)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("log")
    options.add_argument("profile", help="made by `oper profile` from a log with these tables")
    options.add_argument("run", type=Path, help="a folder for plans and checkpoints")
    options.add_argument("--steps", type=int, default=30, help="global batches to train on")
    given = options.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    for name in (None, "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    join_ranks()
    given.run.mkdir(exist_ok=True)

    plan = plan_for_these_ranks(given.run, given.profile)
    model = make_model(plan)
    layers = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adagrad(layers.values(), lr=0.02)
    state, done, folder = {"layers": optimizer}, 0, given.run / "checkpoint"
    if folder.exists():
        done = oper.load(model, folder, state=state).step or 0
    print(f"rank {dist.get_rank()} of {plan.ranks} is process {os.getpid()}", flush=True)
    for step, (dense, ids, labels) in enumerate(
        batches(given.log, given.profile, plan, done), done + 1
    ):
        if step > given.steps:
            break
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids).squeeze(-1), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / plan.ranks
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item()!r}", flush=True)
        if step % SAVE_EVERY == 0:
            oper.save(model, folder, step=step, state=state, overwrite=True)


if __name__ == "__main__":
    main()
