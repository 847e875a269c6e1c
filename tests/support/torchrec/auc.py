"""A DLRM on 80,000 samples of Criteo-Kaggle, all 39 fields as categories: training, held-out AUC.

Every sample is seen once, in the order of the log, in the same global batches whatever the ranks:
rank r of W takes the r-th of W equal parts of a batch. So the mean over ranks of each rank's mean
loss is the batch's, and so is its gradient.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from oper.logs import LogKeywords, read
from oper.plan.plan import Plan

BATCH = 512
# FBGEMM's eps, which is not the default of the unsharded optimizer.
TABLE_OPTIMIZER = {"lr": 0.02, "eps": 1e-8}
# Not Adagrad for the layers too: its first steps are signs of gradients, which turn rounding into
# 1e-4 of AUC; with this, a relative noise of 1e-6 in all weights moves the AUC by 4e-6.
LAYER_LEARNING_RATE = 0.1


class Dlrm(nn.Module):
    """DLRM without dense input: pooled embeddings, their dot products, an MLP to one logit."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.columns),
            )
            for table in plan.tables
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables)
        self.fields, self.dim = len(tables), tables[0].embedding_dim
        pairs = self.fields * (self.fields - 1) // 2
        inputs = self.fields * self.dim + pairs
        self.over = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embeddings(ids).values()
        fields = pooled.view(-1, self.fields, self.dim)
        products = fields @ fields.transpose(1, 2)
        first, second = torch.triu_indices(self.fields, self.fields, 1)
        return self.over(torch.cat([pooled, products[:, first, second]], 1)).squeeze(-1)


def make_dlrm(plan: Plan) -> Dlrm:
    """Make a model whose weights are equal in every process."""
    torch.manual_seed(0)
    model = Dlrm(plan)
    tables = model.embeddings.parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, tables, TABLE_OPTIMIZER)
    return model


def parts(
    log: Path, folder: Path, rows: str, rank: int, ranks: int
) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """Ids and labels of a rank's part of each whole batch of the log."""
    share = BATCH // ranks
    options: LogKeywords = {"missing": "-1", "label": "label", "rows": rows}
    for batch in read(log, Plan.load(folder).tables, folder=folder, batch_size=BATCH, **options):
        if batch.samples == BATCH:
            part = batch.slice(rank * share, (rank + 1) * share)
            assert part.label is not None
            yield part.to_kjt(), torch.tensor(part.label)


def train_and_score(
    model: nn.Module, log: Path, folder: Path, rank: int, ranks: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits and labels of the held-out fifth, after one pass over the rest; each rank's part."""
    layers = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(layers, lr=LAYER_LEARNING_RATE)
    for ids, labels in parts(log, folder, "0:80%", rank, ranks):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scored = [
            (model(ids), labels) for ids, labels in parts(log, folder, "80%:100%", rank, ranks)
        ]
    logits, clicks = (torch.cat(part).numpy() for part in zip(*scored, strict=True))
    return logits, clicks


def auc(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """The chance that a click's logit is above another sample's, half for ties (Mann-Whitney)."""
    clicks = int(labels.sum())
    above = rankdata(logits)[labels == 1].sum() - clicks * (clicks + 1) / 2
    return float(above / (clicks * (len(labels) - clicks)))


def train_unsharded(rank: int, log: Path, folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The model alone in one process."""
    return train_and_score(make_dlrm(Plan.load(folder)), log, folder, rank, ranks=1)


def train_under_oper(rank: int, log: Path, folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """One rank of the model under a plan."""
    import oper

    plan = Plan.load(folder)
    model = oper.shard(make_dlrm(plan), plan)
    return train_and_score(model, log, folder, rank, dist.get_world_size())
