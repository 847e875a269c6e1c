"""TorchRec's own sharding-parity tests (ModelParallelTestShared) with OPER's sharder, on gloo.

They compare predictions after one step; test_torchrec.py compares tables after three.
"""

import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

from oper.base.errors import OperError
from oper.tables.table import Table
from tests.support.runtime.ranks import RankFailedError
from tests.support.runtime.worlds import Worlds
from tests.support.torchrec.models import plan_tables

# TorchRec's helpers import a test of theirs that is not in its wheel.
_missing = ModuleType("torchrec.distributed.tests.test_sequence_model")
_missing.TestEmbeddingCollectionSharder = None  # type: ignore[attr-defined]
sys.modules.setdefault(_missing.__name__, _missing)

from torchrec.distributed.test_utils.test_model import ModelInput  # noqa: E402
from torchrec.distributed.test_utils.test_model_parallel import (  # noqa: E402
    ModelParallelTestShared,
)
from torchrec.distributed.test_utils.test_sharding import (  # noqa: E402
    sharding_single_rank_test_single_process,
)

from oper.torchrec.sharders import OperEmbeddingBagCollectionSharder  # noqa: E402


class Parity(ModelParallelTestShared):
    """TorchRec's test, on our processes."""

    def __init__(self, worlds: Worlds, *before: Any) -> None:
        """`before`: a function that is called with a rank's function, and what comes before that
        among its arguments; the rank's function itself without any."""
        super().__init__()
        self._worlds, self._before = worlds, before

    def check(self, world_size: int = 2, **case: Any) -> None:
        """Run one case: arguments are those of TorchRec's `_test_sharding`."""
        self.setUp(backend="gloo")
        try:
            self._check(world_size, case)
        finally:
            self.tearDown()

    def _check(self, world_size: int, case: dict[str, Any]) -> None:
        self._build_tables_and_groups(data_type=case.get("data_type", DataType.FP32))
        configs = [*self.tables, *self.weighted_tables]
        dtype = self.tables[0].data_type.name.lower()
        tables = [
            Table(c.name, c.num_embeddings, c.embedding_dim, dtype, optimizer="sgd")
            for c in configs
        ]
        plan = plan_tables(tables, world_size)
        sharder = OperEmbeddingBagCollectionSharder(plan, {"learning_rate": 0.1})
        self._test_sharding(
            sharders=[sharder],
            backend="gloo",
            world_size=world_size,
            **case,
        )

    def _run_multi_process_test(self, *, callable: Any, world_size: int = 2, **case: Any) -> None:
        # TorchRec's own `callable` makes its process groups itself.
        self._worlds.run(world_size, *self._before, _one_rank, case)


def _one_rank(rank: int, group: Any, case: dict[str, Any]) -> None:
    case = {name: value for name, value in case.items() if name != "backend"}
    with patch.object(ModelInput, "generate", _generate):
        sharding_single_rank_test_single_process(
            pg=group, device=torch.device("cpu"), rank=rank, world_size=group.size(), **case
        )


_generate_by_lengths = ModelInput.generate


def _generate(
    *, use_offsets: bool, offsets_dtype: torch.dtype, **given: Any
) -> tuple[ModelInput, list[ModelInput]]:
    """Return TorchRec's batches, with valid offsets: TorchRec 1.6 begins the offsets of every
    feature with 0, so that a batch has more lengths than bags."""
    of_all, of_ranks = _generate_by_lengths(**given)
    for batch in [of_all, *of_ranks] if use_offsets else []:
        batch.idlist_features = _by_offsets(batch.idlist_features, offsets_dtype)
        batch.idscore_features = _by_offsets(batch.idscore_features, offsets_dtype)
    return of_all, of_ranks


def _by_offsets(batch: Any, dtype: torch.dtype) -> KeyedJaggedTensor:
    offsets, weights = batch.offsets().to(dtype), batch.weights_or_none()
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, offsets=offsets)


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "mean": {"pooling": PoolingType.MEAN},
    "fp16": {"data_type": DataType.FP16},
    "variable batch": {"variable_batch_size": True},
    "zero batch": {"allow_zero_batch_size": True},
    "int32": {
        "indices_dtype": torch.int32,
        "offsets_dtype": torch.int32,
        "lengths_dtype": torch.int32,
    },
    "offsets": {"use_offsets": True},
    "apply optimizer": {
        "apply_optimizer_in_backward_config": {
            "embedding_bags": (torch.optim.SGD, {"lr": 0.01}),
        },
    },
}


@pytest.mark.parametrize("case", CASES)
def test_torchrecs_own(worlds, case):
    Parity(worlds).check(**CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_torchrecs_own_on_four_ranks(worlds, case):
    Parity(worlds).check(world_size=4, **CASES[case])


def test_a_batch_size_for_each_feature_is_refused(worlds):
    with pytest.raises(RankFailedError, match=f"{OperError.__name__}.*number of samples"):
        Parity(worlds).check(variable_batch_per_feature=True)
