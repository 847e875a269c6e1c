"""A script for torchrun: trains a table and dense layers in DDP, and saves a checkpoint every few
steps, till a rank is killed after some seconds of that.

    torchrun … train_till_killed.py FOLDER RANK SECONDS [LIBRARY]

With a library of emulated kernels the table is on emulated devices.
"""

import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import oper
from oper.tables.table import tables_of
from tests.support.cuda.torchrec_cases import on_device
from tests.support.runtime.runtime_plans import random_plan

ROWS, SAMPLES = 2000, 64


class Model(nn.Module):
    """Dense layers that take longer than the table."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=16, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection([table])
        self.dense = nn.Sequential(nn.Linear(16, 800), nn.ReLU(), nn.Linear(800, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """A value of each sample."""
        return self.dense(self.bags(ids).values())


def main() -> None:
    """Train without end."""
    folder, victim, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    unsharded = Model()
    plan = random_plan(0, tables_of(unsharded), dist.get_world_size())
    with on_device(sys.argv[4]) if len(sys.argv) > 4 else nullcontext():
        model = oper.shard(unsharded, plan)
    step = 0
    while True:
        ids = torch.randint(0, ROWS, (SAMPLES,))
        lengths = torch.ones(SAMPLES, dtype=torch.int32)
        model(KeyedJaggedTensor(["f"], ids, lengths=lengths)).square().mean().backward()
        step += 1
        if step % 3 == 0:
            save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
        if step == 3 and dist.get_rank() == victim:
            (folder / "process").write_text(str(os.getpid()))
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(seconds, os.kill, kill).start()


if __name__ == "__main__":
    main()
