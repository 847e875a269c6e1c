"""Natural mistakes in a TorchRec script: each is an error that says what to do, or is taken as it
was meant; and what is said of a model is said once."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper
from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.tables.table import Table
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import sharder_cases
from tests.support.torchrec.models import Model
from tests.support.torchrec.one_rank import parallel, plan_of, profile_of

BAG_SHARDER = oper.OperEmbeddingBagCollectionSharder
SEQUENCE_SHARDER = oper.OperEmbeddingCollectionSharder


MISTAKES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "OPER's plan": (
        lambda model: parallel(model, plan=plan_of(model), sharders=[BAG_SHARDER()]),
        r"expected a plan in TorchRec's form.*pass plan=oper.torchrec_plan\(plan, model\)",
    ),
    "a plan of something else": (
        lambda model: oper.shard(model, cast(Any, 7)),
        "the plan: expected one of OPER's, or its folder, got a int",
    ),
    "sharded twice": (
        lambda model: oper.shard(oper.shard(model, plan_of(model)), plan_of(Model("meta"))),
        r"^ShardedModel: .*; '[a-z_.]*bags' is already sharded, by OPER: use the model",
    ),
    "planned when sharded": (
        lambda model: oper.OperShardingPlanner("cpu:1", profile_of(model)).plan(
            oper.shard(model, plan_of(model))
        ),
        r"no collection that the sharders take; .*bags' is already sharded, by OPER",
    ),
}


# Errors that TorchRec raises by itself, which tells its sharders to nobody.
MISSING_SHARDERS: dict[str, tuple[Callable[[], list[Any]], type[Exception], str]] = {
    "all forgotten": (
        lambda: [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
        ValueError,
        "not supported oper.OperEmbeddingBagCollectionSharder$",
    ),
    "the other one missing": (
        lambda: [BAG_SHARDER()],
        KeyError,
        "torchrec.modules.embedding_modules.EmbeddingCollection'",
    ),
    "classes": (
        lambda: [BAG_SHARDER, SEQUENCE_SHARDER],
        KeyError,
        "torchrec.modules.embedding_modules.EmbeddingBagCollection'",
    ),
    "one of TorchRec's": (
        lambda: [BAG_SHARDER(), EmbeddingCollectionSharder()],
        ValueError,
        "not supported oper.OperEmbeddingCollectionSharder$",
    ),
}


@pytest.mark.parametrize("mistake", MISSING_SHARDERS)
def test_sharders_that_cannot_shard_by_the_plan(mistake: str) -> None:
    make, kind, text = MISSING_SHARDERS[mistake]
    model = Model("cpu")
    with pytest.raises(kind, match=text):
        parallel(model, plan=oper.torchrec_plan(plan_of(model), model), sharders=make())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    make, text = MISTAKES[mistake]
    with pytest.raises(OperError, match=text):
        make(Model("cpu"))


@pytest.mark.parametrize("given", [float("nan"), float("inf"), 0, -1, "60", None, True])
def test_deadlines_are_positive_numbers_of_seconds(given: Any) -> None:
    """With NaN no wait would end. Before any table is set up, and also of one rank."""
    model = Model("cpu")
    for use in (
        lambda: oper.shard(model, plan_of(model), deadline_seconds=given),
        lambda: BAG_SHARDER(plan_of(model), deadline_seconds=given),
        lambda: Node.join(None, given),
    ):
        with pytest.raises(OperError, match=r"deadline_seconds: expected .*number.*, got"):
            use()
    oper.shard(model, plan_of(model), deadline_seconds=np.float32(0.5))


def test_plans_in_torchrecs_form_are_taken_for_plans() -> None:
    model = Model("cpu")
    made = oper.torchrec_plan(plan_of(model), model)
    assert oper.torchrec_plan(made, model).oper_plan is made.oper_plan
    sharders = [BAG_SHARDER(made), SEQUENCE_SHARDER(made)]
    parallel(Model("cpu"), plan=made, sharders=sharders)
    oper.shard(Model("cpu"), made)


def test_names_and_folders_in_the_place_of_objects(tmp_path: Any) -> None:
    profile = profile_of(Model("meta"))
    profile.save(tmp_path / "profile")
    workload = oper.Workload("training", "raw", batch_size=8)
    given: list[tuple[Any, Any]] = [
        (profile, oper.Topology.load("cpu:2")),
        (tmp_path / "profile", "cpu:2"),
    ]
    for number, (counted, topology) in enumerate(given):
        oper.make_plan(counted, topology, workload, oper.PlanSettings()).save(
            tmp_path / f"{number}"
        )
    found = [oper.Plan.load(tmp_path / f"{number}") for number in range(2)]
    maps = [oper.AddressMap.of(plan, 0) for plan in found]
    ids = torch.arange(30)
    expected = maps[0].translate(1, ids)
    for same in (ids.tolist(), ids.numpy().astype(np.uint16), tuple(ids.tolist())):
        assert torch.equal(maps[1].translate(1, same), expected)
    assert maps[0].translate(1, []).shape == (0,)
    for wrong in ([1.5], ["3"], [True], [2**63]):
        with pytest.raises(OperError, match="integers"):
            maps[0].translate(1, wrong)


def test_tables_are_given_to_translate_by_number_or_name() -> None:
    plan = plan_of(Model("meta"))
    addresses = oper.AddressMap.of(plan, cast(Any, np.int64(0)))
    for number, table in enumerate(plan.tables):
        ids = torch.arange(table.rows)
        expected = addresses.translate(number, ids)
        assert torch.equal(addresses.translate(table.name, ids), expected)
    with pytest.raises(OperError, match="'strange': the address map has no such table; it has"):
        addresses.translate("strange", [0])


WORKLOAD = oper.Workload("training", "raw", batch_size=8)
WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "swapped": (
        lambda profile, topology: (topology, profile, WORKLOAD),
        "profile: expected Profile or Path or str, got Topology",
    ),
    "a folder": (
        lambda profile, topology: (profile, topology, WORKLOAD, "p"),
        "settings: expected PlanSettings, got str",
    ),
    "no workload": (
        lambda profile, topology: (profile, topology, "training", oper.PlanSettings()),
        "workload: expected Workload, got str",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_arguments_of_make_plan(wrong: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = WRONG[wrong]
    with pytest.raises(OperError, match=f"make_plan: {words}"):
        oper.make_plan(*arguments(profile_of(Model("meta")), oper.Topology.load("cpu:2")))
    assert not list(tmp_path.iterdir())


WRONG_TYPES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "compare: profile: expected Profile or .*, got int": (oper.compare, (1, "cpu:2", WORKLOAD)),
    "AddressMap.of: plan: expected Plan, got str": (oper.AddressMap.of, ("plan", 0)),
    "Plan.load: folder: expected Path or str, got int": (oper.Plan.load, (1,)),
    "Topology.load: spec: expected Path or .*, got int": (oper.Topology.load, (1,)),
    "record: model: expected Module, got str": (
        lambda model: oper.record(model).__enter__(),
        ("m",),
    ),
    "shard: module: expected Module, got str": (oper.shard, ("model.py", "plan")),
    "torchrec_plan: module: expected Module, got str": (oper.torchrec_plan, ("plan", "model.py")),
    "measure_latency: model: expected Callable, got str": (oper.measure_latency, ("model.py", [])),
    "str: has no collection that OPER sharded": (oper.counters, ("model.py",)),
    "DispatchingLoader: plan: expected Plan, got str": (oper.DispatchingLoader, ([], "plan")),
}


def test_a_plan_is_saved_into_a_folder() -> None:
    with pytest.raises(OperError, match=r"Plan\.save: folder: expected Path or str, got NoneType"):
        plan_of(Model("meta")).save(cast(Any, None))


@pytest.mark.parametrize("words", WRONG_TYPES)
def test_paths_and_others_instead_of_what_they_name(words: str) -> None:
    function, arguments = WRONG_TYPES[words]
    with pytest.raises(OperError, match=words):
        function(*arguments)


def test_other_numbers_of_settings_and_maps() -> None:
    for name in ("extra_memory", "threshold", "dob", "reserve"):
        for wrong in ("1%", True, float("nan")):
            given: Any = {name: wrong}
            with pytest.raises(OperError, match=f"`{name}`: expected a finite number, got"):
                oper.PlanSettings(**given)
    for name in ("threshold", "dob"):
        given = {name: None}
        with pytest.raises(OperError, match="expected a finite number, got 'None'"):
            oper.PlanSettings(**given)
    for half in (np.float32(0.5), torch.tensor(0.5), Decimal("0.5")):
        assert oper.PlanSettings(extra_memory=cast(Any, half), dob=1).extra_memory == 0.5
    plan = plan_of(Model("meta"))
    rank: Any
    for rank in ("0", 0.0, None):
        with pytest.raises(OperError, match=r"rank: expected a whole number, got"):
            oper.AddressMap.of(plan, rank)
    table: Any
    for table in (None, 1.0, True):
        with pytest.raises(OperError, match=r"table: expected a whole number, got"):
            oper.AddressMap.of(plan, 0).translate(table, [0])


# Ids.


@pytest.mark.parametrize("bounds", ["warning", "ignore"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", ["fg", "gf", "xgf"])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [2, 0, 1, 0, 2, 1]])
def test_ids_out_of_range_stay_in_the_users_batch(
    bounds: str, dtype: torch.dtype, keys: str, lengths: list[int]
) -> None:
    configs = [
        EmbeddingConfig(
            name=f"table of {key}", num_embeddings=3, embedding_dim=4, feature_names=[key]
        )
        for key in ["f", "g"]
    ]
    model = EmbeddingCollection(configs)
    rows = {key: model.embeddings[f"table of {key}"].weight.detach().clone() for key in "fg"}
    lengths = lengths[: 2 * len(keys)]
    ids = torch.tensor([1, 99, -3, 2, 77, 0], dtype=dtype)[: sum(lengths)]
    features = KeyedJaggedTensor(list(keys), ids, lengths=torch.tensor(lengths))
    before = ids.clone()
    read: Any = oper.shard(model, plan_of(model), bounds=bounds)(features)
    for key, of_table in rows.items():
        in_range = [i if 0 <= i < 3 else 0 for i in features[key].values().tolist()]
        assert torch.equal(read[key].values(), of_table[in_range])
    torch.stack([read[key].values().sum() for key in rows]).sum().backward()
    assert torch.equal(ids, before)
    assert features.values() is ids


# Parameters.


def test_parameters_of_no_rows_have_sizes_beside_them() -> None:
    plain = Model("cpu")
    sizes = {name: tuple(weight.shape) for name, weight in plain.named_parameters()}
    model = oper.shard(plain, plan_of(plain))
    parameters = dict(model.named_parameters())
    found = oper.Table.of_model(model)
    assert found.keys() == oper.Table.of_model(plain).keys()
    assert set(found) == {name for name in sizes if "embedding" in name}
    for name, table in found.items():
        assert (table.rows, table.dim) == sizes[name]
        assert parameters[name].shape == (0, table.dim)
        assert table.parameters == table.rows * table.dim
        assert table.dtype == "fp32"
    shown = repr(model)
    assert "wide: 50 x 16 fp32" in shown
    assert "Plan of 131 rows of 4 tables on 1 ranks" in shown
    with pytest.raises(OperError, match="has no TorchRec EmbeddingBagCollection"):
        oper.Table.of_model(torch.nn.Linear(2, 2))


def test_dense_optimizers_take_empty_parameters() -> None:
    plain = Model("cpu")
    model = oper.shard(plain, plan_of(plain))
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    for optimizer in (RowWiseAdagrad, torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD):
        optimizer(tables, lr=0.1).step()


@pytest.mark.parametrize("given", [float("nan"), float("inf"), "0.1"])
def test_learning_rates_that_are_set_later_are_finite_numbers(given: Any) -> None:
    model: Any = Model("cpu")
    made: Any = oper.shard(model, plan_of(model))
    fused = made.fused_optimizer
    before = list(made.module.bags.engine.learning_rates)
    with pytest.raises(OperError, match=r"lr: expected a finite number, got"):
        fused.update_hyper_parameters({"lr": given})
    fused.param_groups[0]["lr"] = given
    with pytest.raises(OperError, match=r"lr: expected a finite number, got"):
        fused.step()
    assert made.module.bags.engine.learning_rates == before


# What is said of a model.


def test_a_model_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for all collections, of each kind."""
    model = Model("cpu")
    plan = plan_of(model)
    adams = replace(plan, tables=tuple(replace(t, optimizer="adam") for t in plan.tables))
    for _ in range(2):  # of another model it is said again
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="oper"):
            oper.shard(Model("cpu"), adams, fused_params={"learning_rate": 0.1, "eps": 0.5})
        said = [record.getMessage() for record in caplog.records if record.name.startswith("oper")]
        assert len(said) == 2
        assert "'wide' and at least 3 more: the plan was made for adam" in "\n".join(said)
        assert "eps=0.5 has no effect on optimizer exact_sgd" in said


def test_a_plan_of_another_model_is_not_warned_of_first() -> None:
    """Nothing is sharded then, and nothing data-parallel."""
    other = random_plan(0, (Table("strange", 5, 4),), 1)
    named = pytest.raises(OperError, match="make a plan for this model")
    with warnings.catch_warnings(record=True) as caught, named:
        oper.shard(Model("cpu"), other)
    assert not [each for each in caught if "data-parallel" in str(each.message)]


def test_one_rank_warns_for_all(worlds: Any) -> None:
    said = worlds.run(2, sharder_cases.warned)
    assert [len(texts) for texts in said] == [1, 0], said
    assert "the plan was made for adam" in said[0][0]
