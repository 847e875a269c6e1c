"""Collections inside of modules that map ids to rows by themselves are refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardedModule
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import oper
from oper.base.errors import OperError
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import BAGS, SEQUENCES, Model
from tests.support.torchrec.one_rank import parallel, plan_of, profile_of

BAG_SHARDER = oper.OperEmbeddingBagCollectionSharder
SEQUENCE_SHARDER = oper.OperEmbeddingCollectionSharder


def managed(model: Model, bags: bool) -> nn.Module:
    configs: Any = [BAGS[0]] if bags else [SEQUENCES[1]]
    modules: Any = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device("cpu"),
            input_hash_size=1000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for config in configs
    }
    mapping = ManagedCollisionCollection(modules, configs)
    if bags:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), mapping)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), mapping)


@pytest.mark.parametrize("bags", [True, False])
def test_modules_that_map_ids_are_refused(bags: bool, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Model("cpu")
    plan, profile = plan_of(model), profile_of(model)
    path = "bags" if bags else "sequences"
    setattr(model, path, managed(model, bags))
    text = f"'{path}._embedding_module' is in a ManagedCollisionEmbedding(Bag)?Collection"
    for use in (
        lambda: oper.shard(model, plan),
        lambda: oper.torchrec_plan(plan, model),
        lambda: oper.OperShardingPlanner("cpu:1", profile).plan(model),
    ):
        with pytest.raises(OperError, match=text):
            use()
    # Whose tables are in no plan is left alone.
    names = {config.name for config in (BAGS if bags else SEQUENCES)}
    others = tuple(table for table in tables_of(Model("meta")) if table.name not in names)
    assert path not in oper.torchrec_plan(random_plan(0, others, 1), model).plan


@pytest.mark.parametrize("bags", [True, False])
def test_modules_that_map_ids_are_refused_without_a_plan(bags: bool) -> None:
    """TorchRec's own planner has put the collection inside into its plan."""
    model: Any = Model("cpu")
    plan = plan_of(model)
    path = "bags" if bags else "sequences"
    inner = model.get_submodule(path)
    setattr(model, path, managed(model, bags))
    with pytest.raises(
        OperError, match=f"'{path}._embedding_module': .* '{path}' may be a module that maps"
    ):
        parallel(model, sharders=[BAG_SHARDER(plan), SEQUENCE_SHARDER(plan)])
    # Another such module, which is in no way around the collection, has nothing to do with it.
    kept = managed(model, bags)
    setattr(model, path, inner)
    parallel(model, sharders=[BAG_SHARDER(plan), SEQUENCE_SHARDER(plan)])
    assert not isinstance(kept._embedding_module, ShardedModule)


@pytest.mark.parametrize("bags", [True, False])
def test_modules_that_prune_are_refused_without_a_plan(bags: bool) -> None:
    made: Any = ITEPEmbeddingBagCollection if bags else ITEPEmbeddingCollection
    collection: Any = EmbeddingBagCollection if bags else EmbeddingCollection
    inner = collection([BAGS[0] if bags else SEQUENCES[0]])
    model = nn.Sequential(made(inner, nn.Identity()))
    sharders = [BAG_SHARDER(plan_of(inner)), SEQUENCE_SHARDER(plan_of(inner))]
    with pytest.raises(OperError, match=r"'0\._embedding_(bag_)?collection': .* '0' may be a"):
        parallel(model, sharders=sharders)


def test_paths_alone_decide_nothing_about_a_plan_for_the_model() -> None:
    """A module of the user's own that keeps its collection at such a name is sharded by it."""
    inner = EmbeddingBagCollection([BAGS[0]])
    model: Any = nn.Module()
    model._embedding_bag_collection = inner
    plan = plan_of(inner)
    with pytest.raises(OperError, match=r"'_embedding_bag_collection': .*'the model' may be a"):
        parallel(model, sharders=[BAG_SHARDER(plan)])
    made = parallel(model, sharders=[BAG_SHARDER(plan)], plan=oper.torchrec_plan(plan, model))
    assert isinstance(made.module._embedding_bag_collection, ShardedModule)


def test_collections_of_processed_features_need_a_plan_of_the_model() -> None:
    """A sharder is told where a collection is, and not what is around it."""
    inner = EmbeddingBagCollection([BAGS[0]], is_weighted=True)
    weights = PositionWeightedModuleCollection({"f0": 5})
    model = nn.ModuleDict({"bags": FeatureProcessedEmbeddingBagCollection(inner, weights)})
    plan = plan_of(inner)
    text = r"expected a plan of the whole model, .* a FeatureProcessedEmbeddingBagCollection, which"
    with pytest.raises(OperError, match=text):
        parallel(model, sharders=[BAG_SHARDER(plan)])
    made = parallel(model, sharders=[BAG_SHARDER(plan)], plan=oper.torchrec_plan(plan, model))
    assert isinstance(made.module["bags"]._embedding_bag_collection, ShardedModule)


def test_a_whole_model_that_maps_ids() -> None:
    inner = EmbeddingBagCollection([BAGS[0]])
    pruned = ITEPEmbeddingBagCollection(inner, nn.Identity())
    with pytest.raises(OperError, match="is in a ITEPEmbeddingBagCollection"):
        oper.shard(pruned, plan_of(inner))
