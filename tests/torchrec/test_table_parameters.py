"""Changes that scripts make to sharded tables by way of their modules and parameters: each has its
effect, or is refused by name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import CountBasedEvictionPolicy
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import oper
from oper.base.errors import OperError
from tests.support.torchrec import part_cases
from tests.support.torchrec.models import SAMPLES, Model, batch
from tests.support.torchrec.one_rank import parallel, plan_of, profile_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def sharded(plain: nn.Module | None = None) -> Any:
    plain = plain or Model("cpu")
    return oper.shard(plain, plan_of(plain))


def wide(model: Any) -> Any:
    return dict(model.named_parameters())["bags.embedding_bags.wide.weight"]


def replace_weight(model: Any) -> None:
    model.module.bags.embedding_bags["wide"].weight = nn.Parameter(torch.zeros(50, 16))


def put_data(model: Any) -> None:
    wide(model).data = torch.zeros(50, 16)


def replace_module(model: Any) -> None:
    model.module.bags.embedding_bags["wide"] = nn.EmbeddingBag(50, 16)


def add_module(model: Any) -> None:
    model.module.bags.embedding_bags["new"] = nn.EmbeddingBag(50, 16)


def delete_module(model: Any) -> None:
    del model.module.bags.embedding_bags["wide"]


IN_PLACE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda model: wide(model).register_hook(lambda grad: grad.clamp(-1, 1)), "no hooks"),
    "hook after": (
        lambda model: wide(model).register_post_accumulate_grad_hook(lambda weight: None),
        "no hooks on its parameter",
    ),
    "init": (lambda model: nn.init.ones_(wide(model)), "was written to, which changes no row"),
    "copy": (lambda model: wide(model).detach().zero_(), "was written to, which changes no row"),
    "data": (put_data, "was replaced, which changes no row"),
    "in data": (lambda model: wide(model).data.mul_(2), "was written to, which changes no row"),
    "clamp": (lambda model: wide(model).data.clamp_(-1, 1), "was written to"),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_changes_of_parameters_that_reach_no_row(what: str) -> None:
    change, message = IN_PLACE[what]
    model = sharded()
    change(model)
    with pytest.raises(OperError, match=f"table 'wide': .*{message}"):
        model(batch(0))


def test_a_tables_parameter_is_not_replaced() -> None:
    with pytest.raises(
        OperError, match="table 'wide': expected its own parameter, got another Par"
    ):
        replace_weight(sharded())


def test_reading_data_of_parameters_is_no_write() -> None:
    model = sharded()
    assert wide(model).data.shape == (0, 16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.data.norm()
    model(batch(0))[0].backward()


def test_torch_follows_the_names_of_parameters() -> None:
    model = sharded()
    loss, state = model(batch(0))[0], dict(model.state_dict())
    assert model.over is model.module.over
    found: dict[str, Any] = get_model_state_dict(model)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    parameters = dict(model.named_parameters())
    assert torch.func.functional_call(model, parameters, (batch(0),))[0] == loss
    doubled = {n: 2 * v.detach() for n, v in parameters.items() if n.startswith("over")}
    other = torch.func.functional_call(model, doubled, (batch(0),))[0]
    assert other != loss
    set_model_state_dict(model, {name: 0 * value for name, value in state.items()})
    assert not any(value.any() for value in model.state_dict().values())
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    tables = {name: value.detach().clone() for name, value in parameters.items()}
    with pytest.raises(OperError, match="table 'wide': its parameter was replaced"):
        torch.func.functional_call(model, tables, (batch(0),))


@pytest.mark.parametrize("groups", [False, True])
def test_torch_cannot_number_the_states_of_tables(groups: bool) -> None:
    model = sharded()
    model.fused_optimizer.save_param_groups(groups)
    with pytest.raises(OperError, match=r"oper.save\(model, folder\)"):
        get_optimizer_state_dict(model, model.fused_optimizer)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    assert get_optimizer_state_dict(model, dense)["param_groups"]
    states = model.fused_optimizer.state_dict()["state"]
    assert type(pickle.loads(pickle.dumps(type(states)(a=1)))) is dict


def test_strict_may_come_second_as_in_torch() -> None:
    model, other = sharded(), Model("cpu")
    nn.init.ones_(other.bags.embedding_bags["wide"].weight)
    state = dict(other.state_dict())
    model.load_state_dict(state, True)
    assert bool((model.state_dict()["bags.embedding_bags.wide.weight"] == 1).all())
    lacking = {n: 2 * v for n, v in state.items() if n != "bags.embedding_bags.mean.weight"}
    model.load_state_dict(lacking, False)
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.mean\.weight"):
        model.load_state_dict(lacking, True, False)
    assert bool((model.state_dict()["bags.embedding_bags.wide.weight"] == 2).all())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepcopy": (lambda model: copy.deepcopy(model.fused_optimizer), "cannot be copied: save its"),
    "pickle": (lambda model: pickle.dumps(model.fused_optimizer), "cannot be pickled: save its"),
    "no_sync": (lambda model: model.no_sync(), r"expected oper\.accumulate\(model\)"),
    "assign": (lambda model: model.load_state_dict({}, assign=True), "expected assign=False"),
    "assign third": (lambda model: model.load_state_dict({}, False, True), "expected assign=False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_are_refused_by_name(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(OperError, match=message):
        call(sharded())


def test_fully_shard_of_the_rest_of_a_model(worlds: Any) -> None:
    worlds.run(2, part_cases.fully_sharded)


@pytest.mark.parametrize("change", [replace_module, add_module, delete_module])
def test_modules_of_tables_stay_those_that_sharding_made(change: Callable[[Any], None]) -> None:
    model = sharded()
    change(model)
    with pytest.raises(OperError, match="expected the modules that sharding made"):
        model(batch(0))


def test_the_modules_of_all_tables_are_not_replaced() -> None:
    bags = sharded().module.bags
    with pytest.raises(OperError, match="embedding_bags: expected the modules that sharding made"):
        bags.embedding_bags = Model("cpu").bags.embedding_bags


def tie_collection(plain: Any) -> str:
    plain.again = plain.bags
    return "'again.embedding_bags.wide.weight' and 'bags.embedding_bags.wide.weight'"


def tie_tables(plain: Any) -> str:
    bags = plain.bags.embedding_bags
    bags["other"].weight = bags["mean"].weight = nn.Parameter(torch.ones(50, 8))
    return "'bags.embedding_bags.mean.weight' and 'bags.embedding_bags.other.weight'"


def tie_output(plain: Any) -> str:
    plain.softmax = nn.Linear(16, 50)
    plain.softmax.weight = plain.bags.embedding_bags["wide"].weight
    return "'bags.embedding_bags.wide.weight' and 'softmax.weight'"


@pytest.mark.parametrize("tie", [tie_collection, tie_tables, tie_output])
def test_tied_weights_that_would_come_apart(tie: Callable[[Any], str]) -> None:
    plain = Model("cpu")
    places = tie(plain)
    with pytest.raises(OperError, match="expected its weight at one place of the model") as error:
        oper.shard(plain, plan_of(Model("cpu")))
    for place in places.split(" and "):
        assert place in str(error.value)
    planner = oper.OperShardingPlanner("cpu:1", profile_of(Model("meta")))
    with pytest.raises(OperError, match="expected its weight at one place of the model"):
        planner.plan(plain)


def test_tables_of_one_collection_that_are_tied_without_a_plan_of_the_model() -> None:
    """A plan of TorchRec's planner, and OPER's plan by the sharders."""
    plain = Model("cpu")
    tie_tables(plain)
    plan = plan_of(Model("cpu"))
    sharders: Any = [
        oper.OperEmbeddingBagCollectionSharder(plan),
        oper.OperEmbeddingCollectionSharder(plan),
    ]
    planned = EmbeddingShardingPlanner(Topology(1, "cpu")).plan(plain, sharders)
    places = r"'embedding_bags\.mean\.weight' and 'embedding_bags\.other\.weight'"
    with pytest.raises(OperError, match=places):
        parallel(plain, sharders=sharders, plan=planned)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True), ("mode", "max")],
)
def test_settings_of_torchs_modules_that_sharding_would_lose(setting: str, value: Any) -> None:
    for collection, table in (("bags", "wide"), ("sequences", "seen")):
        plain = Model("cpu")
        tables = plain.bags.embedding_bags if collection == "bags" else plain.sequences.embeddings
        if not hasattr(tables[table], setting):
            continue
        setattr(tables[table], setting, value)
        with pytest.raises(OperError, match=f"table '{table}': expected {setting}="):
            oper.shard(plain, plan_of(plain))


def test_weights_that_change_before_backward_are_refused_as_in_torch() -> None:
    for inference in (False, True):  # an inference tensor has no version to look at
        with torch.inference_mode(inference):
            inputs = batch(0)
        loss = sharded()(inputs)[0]
        if not inference:
            inputs.weighted_ids.weights().mul_(3)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("of", ["sparse", "meta"])
def test_state_dicts_have_values(of: str) -> None:
    model = sharded()
    state = dict(model.state_dict())
    name = "bags.embedding_bags.wide.weight"
    before = state[name].clone()
    state[name] = state[name].to_sparse() if of == "sparse" else state[name].to("meta")
    with pytest.raises(OperError, match="table 'wide': expected a dense tensor with values"):
        model.load_state_dict(state)
    assert torch.equal(model.state_dict()[name], before)


def test_state_dicts_are_loaded_without_a_mistake() -> None:
    model = sharded()
    for assign in (False, True):
        model(batch(0))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.module.load_state_dict(state, assign=assign)
        model(batch(0))
        assert wide(model) is model.module.bags._weights[0]


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_tables_keep_the_dtype_of_the_plan(convert: str) -> None:
    with pytest.raises(OperError, match=r"tables wide, .*: expected rows to keep the dtype"):
        getattr(sharded(), convert)()


def test_tables_stay_where_they_are() -> None:
    with pytest.raises(OperError, match=r"expected the tables to stay on cpu, got meta"):
        sharded().to("meta")
    model = sharded().float().to("cpu").share_memory()
    model(batch(0))[0].backward()


@pytest.mark.parametrize("apply", [apply_optimizer_in_backward, _apply_optimizer_in_backward])
def test_optimizers_come_before_sharding(apply: Any) -> None:
    model = sharded()
    with pytest.raises(OperError, match=r"'wide': expected its optimizer before .* got SGD after"):
        apply(torch.optim.SGD, [wide(model)], {"lr": 1.0})


@pytest.mark.parametrize("on", ["collection", "parameter"])
def test_hooks_that_sharding_would_lose(on: str) -> None:
    plain = Model("cpu")
    if on == "collection":
        plain.bags.register_forward_hook(lambda *_: None)
    else:
        plain.bags.embedding_bags["wide"].weight.register_hook(lambda grad: grad)
    with pytest.raises(OperError, match=r"wide.*expected no hooks .* would lose"):
        sharded(plain)


@pytest.mark.parametrize("setting", ["weight_decay", "eps", "betas", "momentum", "maximize"])
def test_groups_of_tables_have_a_learning_rate_alone(setting: str) -> None:
    fused = sharded().fused_optimizer
    fused.param_groups[0][setting] = 0.5
    with pytest.raises(OperError, match=f"{setting}: cannot be changed while training"):
        fused.step()


def test_schedules_of_torch_are_no_settings() -> None:
    model = sharded()
    optimizer = model.fused_optimizer.optimizers[0][1].optimizers[0][1]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = model.module.bags.engine.learning_rates[0]
    optimizer.step()
    schedule.step()
    optimizer.step()
    assert model.module.bags.engine.learning_rates[0] == before / 2


def test_groups_are_not_added() -> None:
    group = {"params": [nn.Parameter(torch.ones(1))]}
    optimizer = sharded().fused_optimizer.optimizers[0][1].optimizers[0][1]
    with pytest.raises(OperError, match="add_param_group: expected the tables' own groups"):
        optimizer.add_param_group(group)


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "script": lambda model: torch.jit.script(model.module),
    "trace": lambda model: torch.jit.trace(model.module, (batch(0),)),
    "export": lambda model: torch.export.export(model.module.bags, (batch(0).ids,), strict=False),
}


@pytest.mark.parametrize("what", CONVERTED)
def test_tables_are_in_no_graph_of_another_process(what: str) -> None:
    with pytest.raises(OperError, match=r"tables wide, .*scripted, traced or exported, because"):
        CONVERTED[what](sharded())


def test_torchrecs_tracker_is_refused() -> None:
    with pytest.raises(OperError, match=r"expected no ModelDeltaTrackerTrec, got one.*save_delta"):
        ModelDeltaTrackerTrec(sharded())


def test_inverse_indices_are_refused() -> None:
    """The unsharded collection expands its output by them."""
    ids = batch(0).ids
    given = KeyedJaggedTensor(
        ids.keys(),
        ids.values(),
        lengths=ids.lengths(),
        inverse_indices=(ids.keys(), torch.zeros(len(ids.keys()), SAMPLES, dtype=torch.int64)),
    )
    with pytest.raises(OperError, match="expected no inverse_indices, got some"):
        sharded().module.bags(given)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stash_weights", True),
        ("total_num_buckets", 2),
        ("virtual_table_eviction_policy", CountBasedEvictionPolicy()),
    ],
)
def test_configs_of_other_kinds_of_tables(setting: str, value: Any, monkeypatch: Any) -> None:
    model = Model("cpu")
    monkeypatch.setattr(model.bags.embedding_bag_configs()[0], setting, value)
    with pytest.raises(OperError, match=f"'wide': its config sets {setting}"):
        sharded(model)
