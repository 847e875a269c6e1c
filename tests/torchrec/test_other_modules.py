"""Modules with rows that no sharder takes are refused by name, with what to do instead."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

import oper
from oper.base.errors import OperError
from oper.diagnosis.doctor import doctor
from oper.profiling.profile import with_held_out
from oper.torchrec.planning import planner_inputs
from tests.support.torchrec.models import BAGS, SEQUENCES
from tests.support.torchrec.one_rank import plan_of, profile_of

SGD: dict[str, Any] = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}


class TailoredBags(EmbeddingBagCollection):
    pass


class TailoredSequences(EmbeddingCollection):
    pass


def quantised() -> nn.Module:
    return quantize_inference_model(nn.ModuleDict({"inner": EmbeddingBagCollection(BAGS)})).inner


OTHERS: dict[str, Any] = {
    "a QuantEmbeddingBagCollection": (quantised, "before it was quantised"),
    "a FusedEmbeddingBagCollection": (
        lambda: FusedEmbeddingBagCollection(BAGS, **SGD),
        "apply_optimizer_in_backward",
    ),
    "a FusedEmbeddingCollection": (
        lambda: FusedEmbeddingCollection(SEQUENCES, **SGD, device=torch.device("meta")),
        "apply_optimizer_in_backward",
    ),
    "a TailoredBags": (lambda: TailoredBags(BAGS), "by exact type"),
    "a TailoredSequences": (lambda: TailoredSequences(SEQUENCES), "by exact type"),
}


@pytest.mark.parametrize("called", OTHERS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a collection"])
def test_other_collections_are_refused_by_name(called: str, beside: bool) -> None:
    make, to_do = OTHERS[called]
    of_bags = "Sequence" not in called and "EmbeddingCollection" not in called
    plain: Any = EmbeddingBagCollection(BAGS) if of_bags else EmbeddingCollection(SEQUENCES)
    other: Any = EmbeddingCollection(SEQUENCES) if of_bags else EmbeddingBagCollection(BAGS)
    plan = plan_of(nn.ModuleList([plain, other]))
    model = nn.ModuleDict({"tables": make()} | ({"others": other} if beside else {}))
    for use in (oper.shard, lambda model, plan: oper.torchrec_plan(plan, model)):
        with pytest.raises(OperError, match=f"'tables', {called}, .*{to_do}"):
            use(model, plan)
    if not beside:
        profile = profile_of(nn.ModuleList([plain, other]))
        with pytest.raises(OperError, match=f"'tables', {called}.*{to_do}"):
            oper.OperShardingPlanner("cpu:1", profile).plan(model)
    (found,) = (f for f in doctor(plan, model).problems if f.about == "modules")
    assert f"'tables', {called}" in found.says
    assert to_do in (found.do or "")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_torchs_own_embeddings_are_refused_by_name(kind: Any) -> None:
    plan = plan_of(EmbeddingBagCollection(BAGS))
    called = f"a torch.nn.{kind.__name__}"
    with pytest.raises(OperError, match=f"'tables', {called}: .*EmbeddingBagConfig"):
        oper.shard(nn.ModuleDict({"tables": kind(10, 4)}), plan)
    # One that is called as a table of the plan is meant to be that.
    named = nn.ModuleDict({BAGS[0].name: kind(10, 4), "bags": EmbeddingBagCollection(BAGS[1:])})
    with pytest.raises(OperError, match=f"table '{BAGS[0].name}' of the plan is in .*{called}"):
        oper.shard(named, plan)
    # Others, such as the positions of a sequence, are left to every rank.
    positions = nn.ModuleDict({"positions": kind(10, 4), "bags": EmbeddingBagCollection(BAGS)})
    assert list(oper.torchrec_plan(plan, positions).plan) == ["bags"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_namesake_of_a_table_is_no_table(kind: Any) -> None:
    bags = EmbeddingBagCollection(BAGS)
    plan, profile = plan_of(bags), profile_of(bags)
    model = nn.ModuleDict({"decoder": nn.ModuleDict({BAGS[0].name: kind(7, 3)}), "bags": bags})
    assert list(oper.torchrec_plan(plan, model).plan) == ["bags"]
    assert not [f for f in doctor(plan, model).problems if f.about == "modules"]
    assert list(oper.OperShardingPlanner("cpu:1", profile).plan(model).plan) == ["bags"]


def test_the_planner_tells_of_tables_that_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of(EmbeddingBagCollection(BAGS))
    model = nn.ModuleDict(
        {"bags": EmbeddingBagCollection(BAGS[1:]), "mine": TailoredBags(BAGS[:1])}
    )
    with caplog.at_level("WARNING"):
        found = oper.OperShardingPlanner("cpu:1", profile).plan(model)
    assert list(found.plan) == ["bags"]
    said = f"table '{BAGS[0].name}' of the profile is in 'mine', a TailoredBags"
    assert any(said in record.getMessage() for record in caplog.records)


def test_the_planner_judges_its_plan_on_data_held_out() -> None:
    bags = EmbeddingBagCollection(BAGS)
    first, later = profile_of(bags), profile_of(bags)
    later.accesses = later.accesses[::-1].copy()
    plan = oper.OperShardingPlanner("cpu:1", with_held_out(first, later)).plan(bags).oper_plan
    assert plan.held_out is not None
    adapted = planner_inputs.profile_of(later, plan.tables)
    now = oper.drift(plan, adapted).judgement.keep.transfer_seconds
    assert plan.held_out.objective_seconds == pytest.approx(now)


def test_a_model_that_is_such_a_module_itself() -> None:
    plan = plan_of(EmbeddingBagCollection(BAGS))
    with pytest.raises(OperError, match="the model itself, a TailoredBags"):
        oper.shard(TailoredBags(BAGS), plan)
    with pytest.raises(OperError, match="which OPER shards; give the model that has them"):
        oper.shard(nn.Linear(2, 2), plan)


def test_an_optimizer_inside_is_refused_though_its_tables_are_not_planned() -> None:
    """TorchRec would take the collection for one that is to be on every rank, and fail on it."""
    plan = plan_of(EmbeddingBagCollection(BAGS[1:]))
    model = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(BAGS[1:]),
            "fused": FusedEmbeddingBagCollection(BAGS[:1], **SGD),
        }
    )
    with pytest.raises(OperError, match="'fused', a FusedEmbeddingBagCollection: Distributed"):
        oper.shard(model, plan)
    problems = [f.says for f in doctor(plan, model).problems]
    assert problems == ["'fused', a FusedEmbeddingBagCollection: no sharder of OPER's takes it"]
