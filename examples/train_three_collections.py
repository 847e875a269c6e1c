"""Train one model with bags, sequences and weighted bags by one plan of OPER's, on CPU ranks.

    python examples/train_three_collections.py plan
    oper doctor plan examples/train_three_collections.py:make_model
    oper plan show plan

The first command makes up ids, profiles them, writes the plan, trains by it on 2 ranks, and
compares each loss with that of the unsharded model; the others say whether plan and model fit, and
where the rows are. torchrun --nproc-per-node 4 examples/train_three_collections.py plan takes 4.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torchrun
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper

USERS, REGIONS, ITEMS, TOPICS = 5_000, 200, 20_000, 1_000  # rows of the tables
DIM, LONGEST = 16, 8  # of a row; items of a sequence, and topics of a sample
STEPS, SAMPLES = 60, 256  # SAMPLES on each rank in a step
AGREE = 1e-6  # losses differ by less, as sums have other orders


class Batch(NamedTuple):
    """A rank's samples of a step."""

    ids: KeyedJaggedTensor  # user and region, one id each; seen, some items
    interests: KeyedJaggedTensor  # topic, some with a weight each
    label: torch.Tensor


class Model(nn.Module):
    """Does this user click, by user and region, the items seen in their order, and interests?"""

    def __init__(self) -> None:
        super().__init__()
        user = EmbeddingBagConfig(
            name="user", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"]
        )
        region = EmbeddingBagConfig(
            name="region", num_embeddings=REGIONS, embedding_dim=DIM, feature_names=["region"]
        )
        item = EmbeddingConfig(
            name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["seen"]
        )
        topic = EmbeddingBagConfig(
            name="topic", num_embeddings=TOPICS, embedding_dim=DIM, feature_names=["topic"]
        )
        self.bags = EmbeddingBagCollection([user, region])
        self.sequences = EmbeddingCollection([item])
        self.weighted_bags = EmbeddingBagCollection([topic], is_weighted=True)
        self.layers = nn.Sequential(
            nn.Linear((3 + LONGEST) * DIM, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)
        )

    def forward(self, ids: KeyedJaggedTensor, interests: KeyedJaggedTensor) -> torch.Tensor:
        """Logits of the samples."""
        seen = self.sequences(ids)["seen"].to_padded_dense(LONGEST)  # [samples, LONGEST, DIM]
        parts = [self.bags(ids).values(), seen.flatten(1), self.weighted_bags(interests).values()]
        return self.layers(torch.cat(parts, dim=1))


def make_model() -> Model:
    """The unsharded model; the same weights each time."""
    torch.manual_seed(0)
    model = Model()
    # Without eps, TorchRec's unsharded optimizer takes 1e-10, and FBGEMM's, as OPER's, 1e-8.
    settings = {"lr": 0.05, "eps": 1e-8}
    for tables in (model.bags, model.sequences, model.weighted_bags):
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), settings)
    return model


def make_batch(step: int, rank: int) -> Batch:
    """Popular ids come often, as in real logs; who clicks depends on region, items and topics."""
    random = np.random.default_rng((step, rank))

    def draw(rows: int, count: int) -> np.ndarray:
        return (rows * random.random(count) ** 4).astype(np.int64)  # low ids most often

    one = np.ones(SAMPLES, dtype=np.int64)
    items, topics = random.integers(0, LONGEST + 1, (2, SAMPLES))  # of each sample
    user, region = draw(USERS, SAMPLES), draw(REGIONS, SAMPLES)
    seen, topic = draw(ITEMS, items.sum()), draw(TOPICS, topics.sum())
    weight = random.random(len(topic), dtype=np.float32)
    score = 2.0 * (region % 2) - 1
    np.add.at(score, np.repeat(np.arange(SAMPLES), items), seen % 3 - 1)
    np.add.at(score, np.repeat(np.arange(SAMPLES), topics), weight * (topic % 3 - 1))
    ids = KeyedJaggedTensor(
        keys=["user", "region", "seen"],
        values=torch.from_numpy(np.concatenate([user, region, seen])),
        lengths=torch.from_numpy(np.concatenate([one, one, items])),
    )
    interests = KeyedJaggedTensor(
        keys=["topic"],
        values=torch.from_numpy(topic),
        lengths=torch.from_numpy(topics),
        weights=torch.from_numpy(weight),
    )
    return Batch(ids, interests, torch.from_numpy(score > 0).float())


def make_plan(ranks: int, folder: str) -> None:
    """One plan for the tables of all three collections, from the batches of all ranks."""
    batches = (make_batch(step, rank) for step in range(STEPS) for rank in range(ranks))
    profile = oper.profile(batches, make_model())
    workload = oper.Workload("training", batch_size=ranks * SAMPLES)
    plan = oper.make_plan(profile, f"cpu:{ranks}", workload)
    plan.save(folder, overwrite=True)
    gap = None if plan.certificate is None else plan.certificate.certified_gap
    if gap is not None:
        print(f"plan for {ranks} ranks: at most {100 * gap:.3f}% longer than the best possible")


def train(model: nn.Module, ranks: Sequence[int]) -> list[torch.Tensor]:
    """Train these ranks' batches; the mean loss of each step."""
    # The tables' optimizers take their steps in backward.
    layers = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(layers, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_ranks = [
            nn.functional.binary_cross_entropy_with_logits(model(b.ids, b.interests), b.label)
            for b in (make_batch(step, rank) for rank in ranks)
        ]
        loss = torch.stack(of_ranks).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def quiet() -> None:
    """Hide the warnings that torch and TorchRec raise in their own calls."""
    warnings.filterwarnings("ignore", module="torch")
    for name in (None, "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("plan", help="the folder to write the plan to; an older plan is replaced")
    given = options.parse_args()
    if "RANK" not in os.environ:  # not under torchrun: start it, for 2 ranks on this host
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun.main(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return
    quiet()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_plan(ranks, given.plan)
    dist.barrier()  # the plan is there
    model = oper.shard(make_model(), given.plan)
    sharded = torch.stack(train(model, [rank]))
    dist.all_reduce(sharded)
    sharded /= ranks
    if rank == 0:
        unsharded = torch.stack(train(make_model(), range(ranks)))  # all ranks' batches
        for step in (*range(0, STEPS, 10), STEPS - 1):
            print(f"step {step:>2}: loss {sharded[step]:.5f}, unsharded {unsharded[step]:.5f}")
        apart = float((sharded - unsharded).abs().max())
        if apart > AGREE:
            raise SystemExit(f"losses differ by up to {apart:.1e}, and {AGREE:.0e} was allowed")
        print(f"the losses of all {STEPS} steps differ by at most {apart:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
