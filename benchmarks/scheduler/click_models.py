"""Wide & Deep, DeepFM and DCN, small, on 13 dense values and 26 categorical features.

As HET has them (three hidden layers, three cross layers), but with 64 instead of 256 values in a
hidden layer. The wide part and the first-order terms are linear in the embeddings.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from oper.tables.table import Table

DENSE, HIDDEN = 13, 64


class _Deep(nn.Sequential):
    def __init__(self, inputs: int, layers: int, outputs: int | None) -> None:
        sizes = [inputs, *[HIDDEN] * layers]
        parts: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            parts += [nn.Linear(size, following), nn.ReLU()]
        super().__init__(*parts, *([nn.Linear(HIDDEN, outputs)] if outputs else []))


class _WideAndDeep(nn.Module):
    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        inputs = DENSE + fields * dim
        self.wide, self.deep = nn.Linear(inputs, 1), _Deep(inputs, 3, 1)

    def forward(self, dense: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([dense, fields.flatten(1)], 1)
        out: torch.Tensor = self.wide(inputs) + self.deep(inputs)
        return out


class _DeepFm(nn.Module):
    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        inputs = DENSE + fields * dim
        self.first, self.deep = nn.Linear(inputs, 1), _Deep(inputs, 3, 1)

    def forward(self, dense: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([dense, fields.flatten(1)], 1)
        pairs = fields.sum(1).square() - fields.square().sum(1)  # twice their products
        out: torch.Tensor = self.first(inputs) + self.deep(inputs) + pairs.sum(1, True) / 2
        return out


class _Dcn(nn.Module):
    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        inputs = DENSE + fields * dim
        self.crosses = nn.ModuleList(nn.Linear(inputs, 1) for _ in range(3))
        self.deep = _Deep(inputs, 3, None)
        self.over = nn.Linear(inputs + HIDDEN, 1)

    def forward(self, dense: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([dense, fields.flatten(1)], 1)
        crossed = inputs
        for cross in self.crosses:
            crossed = crossed + inputs * cross(crossed)
        out: torch.Tensor = self.over(torch.cat([crossed, self.deep(inputs)], 1))
        return out


OVER = {"wide-deep": _WideAndDeep, "deepfm": _DeepFm, "dcn": _Dcn}


class ClickModel(nn.Module):
    """A model by its name in OVER; returns the mean loss, or logits without labels."""

    def __init__(self, name: str, tables: Sequence[Table], seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Small, so that sums of products of embeddings begin near 0.
        self.fields, self.dim = len(tables), tables[0].dim
        self.embeddings = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=[table.name],
                    init_fn=_initial,
                )
                for table in tables
            ],
            device=torch.device("meta"),
        )
        self.over = OVER[name](self.fields, self.dim)

    def forward(
        self, dense: torch.Tensor, ids: KeyedJaggedTensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        pooled = self.embeddings(ids).values().view(-1, self.fields, self.dim)
        logits = self.over(dense, pooled).squeeze(1)
        if labels is None:
            return logits
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _initial(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, std=0.01)
