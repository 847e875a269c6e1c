"""Arguments that TorchRec's classes take are answered with the setting of OPER's."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, CacheParams

import oper
from oper.base.errors import OperError
from oper.torchrec.torchrec_arguments import INSTEAD
from tests.support.torchrec.models import BAGS, Model
from tests.support.torchrec.one_rank import parallel, plan_of, profile_of

SHARD_MODULES: Any = importlib.import_module("torchrec.distributed.shard")


def planner(**given: Any) -> Any:
    return oper.OperShardingPlanner("cpu:1", profile_of(Model("meta")), **given)


def shard(**given: Any) -> Any:
    model = Model("cpu")
    return oper.shard(model, plan_of(model), **given)


CALLS: list[tuple[Callable[..., Any], Any, set[str]]] = [
    (planner, EmbeddingShardingPlanner, {"topology", "batch_size", "constraints"}),
    (oper.OperEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder, {"fused_params"}),
    (oper.OperEmbeddingCollectionSharder, EmbeddingCollectionSharder, {"fused_params"}),
    (shard, DistributedModelParallel, {"module", "env", "device", "plan"}),
    (shard, DMPCollection, {"module", "device", "plan"}),
    (shard, SHARD_MODULES.shard_modules, {"module", "env", "device", "plan"}),
]
GIVEN = [
    pytest.param(call, name, id=f"{theirs.__name__}-{name}")
    for call, theirs, taken in CALLS
    for name in inspect.signature(theirs).parameters
    if name not in taken
]


@pytest.mark.parametrize(("call", "name"), GIVEN)
def test_every_argument_of_torchrecs_is_answered(call: Callable[..., Any], name: str) -> None:
    with pytest.raises(OperError, match=f"{name}.*: (give|leave|make|OPER)"):
        call(**{name: object()})


@pytest.mark.parametrize("name", INSTEAD)
def test_answers_are_of_arguments_that_oper_lacks(name: str) -> None:
    calls: tuple[Callable[..., Any], ...] = (shard, oper.OperEmbeddingBagCollectionSharder)
    for call in calls:
        with pytest.raises(OperError, match=name):
            call(**{name: object()})


@pytest.mark.parametrize("call", [planner, shard, oper.OperEmbeddingCollectionSharder])
def test_other_arguments_are_answered_with_those_there_are(call: Callable[..., Any]) -> None:
    with pytest.raises(OperError, match=r"has no option 'nonsense'; it has b"):
        call(nonsense=1)


PLANNED: dict[str, Any] = {
    "bounds_check_mode": BoundsCheckMode.WARNING,
    "cache_params": CacheParams(load_factor=0.5),
    "stochastic_rounding": True,
    "enforce_hbm": True,
}


@pytest.mark.parametrize("setting", PLANNED)
def test_settings_of_torchrecs_own_plan_are_refused(setting: str) -> None:
    """Its planner puts constraints into the plan, which no sharder of OPER's reads."""
    model = Model("cpu")
    tables = [config.name for config in BAGS]
    constraints = dict.fromkeys(tables, ParameterConstraints(**{setting: PLANNED[setting]}))
    sharders = [oper.OperEmbeddingBagCollectionSharder(plan_of(model))]
    planning = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    theirs = planning.plan(model, sharders)
    with pytest.raises(OperError, match=f"expected a plan without {setting}"):
        parallel(model, plan=theirs, sharders=sharders)


def test_a_model_that_the_plan_lacks_a_collection_of_is_warned_of_once() -> None:
    model = Model("cpu")
    bags = EmbeddingBagCollection(list(BAGS))
    with pytest.warns(UserWarning, match=r"(weighted|sequences): .* data-parallel") as caught:
        oper.shard(model, plan_of(bags))
    texts = [str(each.message) for each in caught if "data-parallel" in str(each.message)]
    assert [text.split(":")[0] for text in texts] == ["weighted", "sequences"]
