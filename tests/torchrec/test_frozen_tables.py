"""`requires_grad` of tables' parameters, before and after sharding."""

import pytest
import torch

import oper
from oper.base.errors import OperError
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import frozen_cases as cases
from tests.support.torchrec.models import Model, batch
from tests.support.torchrec.one_rank import plan_of
from tests.support.torchrec.ranks import OPTIMIZERS

BETWEEN_NODES = [{"nodes": (0, 1)}, {"nodes": (0, 1), "fetch": "distinct"}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tables_are_frozen_and_trained_again(worlds, kind):
    worlds.run(2, cases.toggled, kind)


@pytest.mark.parametrize("options", [*BETWEEN_NODES, {"nodes": (0, 1), "fetch": "pooled"}])
def test_tables_are_frozen_between_nodes(worlds, options):
    worlds.run(2, cases.toggled, "adam", **options)


@pytest.mark.parametrize("options", [{}, *BETWEEN_NODES, {"copies": 1.0}])
def test_frozen_before_or_after_the_others_get_the_same_bits(worlds, options):
    worlds.run(2, cases.frozen_before_or_after, "rowwise_adagrad", **options)


def test_one_rank_alone(worlds):
    worlds.run(1, cases.toggled, "adam")


def test_frozen_in_forward_or_backward_alone(worlds):
    worlds.run(2, cases.around_forward)


def test_frozen_while_gradients_are_held_back(worlds):
    worlds.run(2, cases.accumulated)


@pytest.mark.parametrize("options", [{}, *BETWEEN_NODES])
@pytest.mark.parametrize("everywhere", [True, False])
def test_ranks_that_freeze_different_tables(worlds, everywhere, options):
    worlds.run(2, cases.unlike, everywhere, **options)


def test_ranks_that_freeze_different_tables_while_gradients_are_held_back(worlds):
    worlds.run(2, cases.unlike_while_held)


def test_tables_of_the_tier(worlds):
    worlds.run(2, cases.in_the_tier)


def test_parameters_tell_what_was_frozen_before() -> None:
    plain = Model("cpu")
    plain.bags.embedding_bags["wide"].weight.requires_grad_(False)
    model = oper.shard(plain, plan_of(plain))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["bags.embedding_bags.wide.weight"]


def test_a_table_that_was_frozen_before_has_no_optimizer_to_train_it() -> None:
    plain = Model("cpu")
    plain.bags.embedding_bags["wide"].weight.requires_grad_(False)
    model = oper.shard(plain, plan_of(plain))
    model.requires_grad_(True)
    with pytest.raises(OperError, match=r"'wide': expected requires_grad False, .*got True"):
        model(batch(0))


def test_plans_for_inference_serve_frozen_models() -> None:
    plain = Model("cpu").requires_grad_(False).eval()
    plan = random_plan(0, tables_of(plain), 1, mode="inference")
    model = oper.shard(plain, plan)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0))[1], Model("cpu")(batch(0))[1])
