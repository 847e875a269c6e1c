"""The lookups of a module: the features that read each table, and their descriptors for the
kernels.

The values of a KeyedJaggedTensor lie feature by feature. Pooled lookups write bag i of a feature to
row i of the output, at the columns of the feature; unpooled ones write each access to a row of its
own, features one after the other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_features, as_words
from oper.runtime.tables.optimizer_buckets import Bucket, EmbeddingTable
from oper.tables.table import Table


@dataclass(frozen=True)
class Feature:
    """One lookup: a feature in a table. `column` is its first column in a pooled output."""

    name: str
    table: int  # of the module
    bucket: int
    column: int


class FeatureSet:
    """The lookups of a module in TorchRec's order, by table and then by feature."""

    def __init__(
        self, plan: Plan, tables: Sequence[EmbeddingTable], buckets: Sequence[Bucket]
    ) -> None:
        self._plan, self._tables = plan, tables
        bucket_of = {t: b for b, bucket in enumerate(buckets) for t in bucket.tables}
        self._buckets, self._bucket_of = buckets, bucket_of
        self.features: list[Feature] = []
        self.pooled = tables[0].pooling != "none"
        column = 0
        for number, table in enumerate(tables):
            for name in table.features:
                self.features.append(Feature(name, number, bucket_of[number], column))
                column += plan.tables[table.index].dim
        self.columns = column
        self._names = [f.name for f in self.features]
        self._number = {name: n for n, name in enumerate(self._names)}
        self._pooled: dict[tuple[tuple[str, ...], int, bool], torch.Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The features' names in the order of the output."""
        return tuple(self._names)

    def order(self, keys: Sequence[str]) -> list[int] | None:
        """Return the numbers of the batch's keys to take, in order, if the batch holds other keys
        or too few; None if every feature is used exactly once, in any order. Features of several
        tables are wanted several times, in the tables' order."""
        keys = list(keys)
        index = {key: n for n, key in enumerate(keys)}
        if len(index) != len(keys):
            twice = next(key for n, key in enumerate(keys) if index[key] != n)
            raise OperError(
                f"feature {twice!r}: expected each feature once in the batch, got this one "
                f"{keys.count(twice)} times: give a feature of several tables once"
            )
        if keys == self._names:
            return None
        missing = [name for name in self._names if name not in index]
        if missing:
            raise OperError(
                f"feature {missing[0]!r}: the batch does not hold it; it has "
                + (", ".join(map(repr, keys[:8])) or "no features")
                + (", …" if len(keys) > 8 else "")
            )
        if len(keys) == len(index) == len(self._number) == len(self._names):
            return None
        return [index[name] for name in self._names]

    def describe(
        self, keys: tuple[str, ...], samples: int, segment_offset: torch.Tensor, trained_only: bool
    ) -> tuple[torch.Tensor, int]:
        """Return the kernels' descriptors [F, FEATURE_WORDS] of a batch's features, and the size of
        the output in elements. With `trained_only`, accesses of frozen tables are not sorted."""
        if not self.pooled:
            return self._describe_accesses(keys, segment_offset.numpy(), trained_only)
        known = (keys, samples, trained_only)
        if known not in self._pooled:
            features = self._described(keys, trained_only)
            features["first_bag"] = np.arange(len(keys)) * samples
            features["bags"] = samples
            features["out_base"] = [feature.column for feature in self.lookups(keys)]
            features["out_stride"] = self.columns
            self._pooled[known] = as_words(features)
        return self._pooled[known], samples * self.columns

    def _describe_accesses(
        self, keys: tuple[str, ...], first: np.ndarray, trained_only: bool
    ) -> tuple[torch.Tensor, int]:
        features = self._described(keys, trained_only)
        size = np.diff(first) * features["dim"]
        features["first_bag"] = first[:-1]
        features["bags"] = np.diff(first)
        features["out_base"] = np.cumsum(size) - size
        features["out_stride"] = features["dim"]
        return as_words(features), int(size.sum())

    def without_gradients(self, descriptors: torch.Tensor, tables: Collection[int]) -> torch.Tensor:
        """Return the descriptors with the lookups of these tables marked as untrained."""
        untrained = descriptors.clone()
        features = as_features(untrained)
        numbers = [n for n, lookup in enumerate(self.features) if lookup.table in tables]
        features["has_gradient"][np.isin(features["lookup"], numbers)] = 0
        return untrained

    def name_of(self, table: int) -> str:
        """Return the name of a table of the module."""
        return self._plan.tables[self._tables[table].index].name

    def in_tier(self, table: int) -> bool:
        """Say whether a table of the module is trained in the tier."""
        return self._buckets[self._bucket_of[table]].tier

    def index(self, lookup: Feature) -> int:
        """Return the number in the plan of a lookup's table."""
        return self._tables[lookup.table].index

    def planned(self, lookup: Feature) -> Table:
        """Return a lookup's table as the plan has it."""
        return self._plan.tables[self.index(lookup)]

    def lookups(self, keys: tuple[str, ...]) -> list[Feature]:
        """Return the lookups in the order of a batch's keys."""
        return [self.features[n] for n in self._numbers(keys)]

    def _numbers(self, keys: tuple[str, ...]) -> Sequence[int]:
        if keys == self.names:
            return range(len(keys))
        return [self._number[key] for key in keys]

    def _described(self, keys: tuple[str, ...], trained_only: bool) -> np.ndarray:
        features = np.zeros(len(keys), FEATURE)
        for n, number in enumerate(self._numbers(keys)):
            lookup = self.features[number]
            bucket, table = self._buckets[lookup.bucket], self._tables[lookup.table]
            features[n]["lookup"] = number
            features[n]["bucket"] = lookup.bucket
            features[n]["width"] = bucket.width
            features[n]["dtype"] = DTYPE_CODE[bucket.dtype]
            features[n]["dim"] = bucket.dim
            features[n]["row_bytes"] = self._plan.tables[table.index].row_bytes
            features[n]["mean"] = table.pooling == "mean"
            features[n]["has_gradient"] = bucket.trained or not trained_only
        return features
