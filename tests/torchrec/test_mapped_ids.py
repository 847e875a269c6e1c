"""Collections inside of modules that map ids to rows by themselves are refused."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
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
    with pytest.raises(OperError, match=f"'{path}._embedding_module' is in a ManagedCollision"):
        parallel(model, sharders=[BAG_SHARDER(plan), SEQUENCE_SHARDER(plan)])
    # Another such module, which is in no way around the collection, has nothing to do with it.
    kept = managed(model, bags)
    setattr(model, path, inner)
    parallel(model, sharders=[BAG_SHARDER(plan), SEQUENCE_SHARDER(plan)])
    assert not isinstance(kept._embedding_module, ShardedModule)


@pytest.fixture
def frozen() -> Iterator[None]:
    """What is there after a test's first lines is not in the collector's list."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.usefixtures("frozen")
def test_modules_that_map_ids_are_refused_whatever_the_collector_lists(bags: bool) -> None:
    model: Any = Model("cpu")
    plan = plan_of(model)
    path = "bags" if bags else "sequences"
    setattr(model, path, managed(model, bags))
    gc.freeze()
    with pytest.raises(OperError, match=f"'{path}._embedding_module' is in a ManagedCollision"):
        parallel(model, sharders=[BAG_SHARDER(plan), SEQUENCE_SHARDER(plan)])


def test_a_collection_that_maps_ids_by_an_unknown_path() -> None:
    """As TorchRec's sharder of such a module hands it over, and a script that shards by hand."""
    pruned = ITEPEmbeddingBagCollection(EmbeddingBagCollection([BAGS[0]]), nn.Identity())
    inner = pruned._embedding_bag_collection
    model = nn.Sequential(pruned)
    sharder, env = BAG_SHARDER(plan_of(inner)), ShardingEnv.from_local(1, 0)
    del pruned
    with pytest.raises(OperError, match="'EmbeddingBagCollection' is in a ITEPEmbeddingBag"):
        sharder.shard(inner, {}, env)
    model[0] = nn.Identity()
    sharder.shard(inner, {}, env)


def test_a_whole_model_that_maps_ids() -> None:
    inner = EmbeddingBagCollection([BAGS[0]])
    pruned = ITEPEmbeddingBagCollection(inner, nn.Identity())
    with pytest.raises(OperError, match="is in a ITEPEmbeddingBagCollection"):
        oper.shard(pruned, plan_of(inner))
