"""Quantisation of sharded models is refused, as it would leave the tables as they are; that of
their dense layers by themselves and of the unsharded model is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.test_utils import infer_utils
from torchrec.distributed.utils import EmbeddingQuantizationUtils
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBags

import oper
from oper.base.errors import OperError
from oper.torchrec.sharded_collections import OperShardedEmbeddingBagCollection
from tests.support.torchrec.models import Model, batch
from tests.support.torchrec.one_rank import plan_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")


class Weighted(nn.Module):
    """A collection whose features have learned weights."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]
        )
        self.bags = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection([table], is_weighted=True),
            PositionWeightedModuleCollection({"f": 5}),
        )


def sequences() -> nn.Module:
    return nn.ModuleDict({"sequences": Model("cpu").sequences})


def sharded(model: nn.Module) -> Any:
    return oper.shard(model, plan_of(model))


QUANTISED: dict[str, Callable[[], Any]] = {
    "embeddings": lambda: quantize_embeddings(sharded(Model("cpu")), torch.qint8, inplace=True),
    "a collection": lambda: quantize_embeddings(
        sharded(Model("cpu")).module.bags, torch.qint8, inplace=True
    ),
    "a model": lambda: quantize_inference_model(sharded(Model("cpu"))),
    "sequences": lambda: quantize_inference_model(sharded(sequences())),
    "weights of features": lambda: quantize_inference_model(sharded(Weighted())),
    "by torchrec's tests": lambda: infer_utils.quantize(sharded(sequences()), inplace=True),
    "features by its tests": lambda: infer_utils.quantize_fpebc(sharded(Weighted()), inplace=True),
    "kernels": lambda: EmbeddingQuantizationUtils().quantize_embedding_modules(
        sharded(Model("cpu")), DataType.FP16
    ),
    "by path": lambda: torch.ao.quantization.quantize_dynamic(
        sharded(Model("cpu")).module,
        {"weighted": torch.ao.quantization.default_dynamic_qconfig},
        inplace=True,
    ),
}


@pytest.mark.parametrize("what", QUANTISED)
def test_sharded_collections_are_not_left_as_they_are(what: str) -> None:
    with pytest.raises(OperError, match=r"OperSharded.* of tables .*cannot be quantised"):
        QUANTISED[what]()


def test_dense_layers_are_quantised_by_themselves() -> None:
    model = sharded(Model("cpu"))
    with pytest.raises(OperError, match="giving the submodule that has them"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    torch.ao.quantization.quantize_dynamic(model.module.over, {nn.Linear}, inplace=True)
    assert type(model.module.over.linear) is torch.ao.nn.quantized.dynamic.Linear
    assert type(model.module.bags) is OperShardedEmbeddingBagCollection
    assert "OperShardedEmbeddingBagCollection(" in repr(model)


def test_the_unsharded_model_with_the_tables_is_quantised() -> None:
    model, plain = sharded(Model("cpu")), Model("meta").to_empty(device="cpu")
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(batch(0))[1]
        quantised = quantize_inference_model(plain)
        assert type(quantised.bags) is QuantBags
        torch.testing.assert_close(quantised(batch(0))[1], expected, atol=0.1, rtol=0.1)
