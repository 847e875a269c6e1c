"""TorchRec's modules on devices: inference and training by DistributedModelParallel and by
oper.shard have the bits of CPU ranks, state dicts and checkpoints go both ways, and what devices do
not do is refused by name on all ranks."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.base.errors import OperError
from oper.tables.table import tables_of
from oper.topology.topology import Topology
from tests.support.cuda import captured_models
from tests.support.cuda import torchrec_cases as cases
from tests.support.runtime import mortal_ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import (
    checkpoint_cases,
    delta_cases,
    equal_settings_cases,
    frozen_cases,
    mixed_optimizer_cases,
    refusal_cases,
    sharder_cases,
    training_cases,
)
from tests.support.torchrec.models import Model
from tests.torchrec import (
    test_deltas,
    test_killed_under_torchrun,
    test_mixed_optimizers,
    test_parity,
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("how", ["shard", "parallel"])
def test_modules_give_the_bits_of_cpu_ranks(worlds, library, ranks, how):
    worlds.run(ranks, cases.served_on_both, library, how, "cpu", "fp32")


@pytest.mark.parametrize(("ranks", "kind"), [(1, "adam"), (2, "rowwise_adagrad"), (4, "adagrad")])
def test_modules_train_the_bits_of_cpu_ranks(worlds, library, ranks, kind):
    for on_device, on_cpu in worlds.run(ranks, captured_models.train_eager, kind, library):
        assert all(map(torch.equal, on_device["outputs"], on_cpu["outputs"]))
        assert any(map(torch.is_nonzero, on_cpu["outputs"][-1]))
        cases.assert_equal(on_device["model"], on_cpu["model"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_rows_give_the_bits_of_cpu_ranks(worlds, library, dtype):
    worlds.run(2, cases.served_on_both, library, "parallel", "cpu", dtype)


def test_models_on_the_meta_device_get_the_rows_of_cpu_ranks(worlds, library):
    worlds.run(2, cases.served_on_both, library, "shard", "meta", "fp32")


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("how", ["shard", "parallel"])
def test_on_two_nodes_they_serve_by_nvshmem(emulated, emulated_nvshmem, how, fetch):
    given = (str(emulated), str(emulated_nvshmem), how, fetch)
    assert mortal_ranks.run(2, cases.served_by_nvshmem, *given) == ["the same"] * 2


@pytest.mark.parametrize("by", ["state dict", "checkpoint"])
@pytest.mark.parametrize("from_device", [True, False])
def test_what_one_kind_of_ranks_saves_the_other_loads(worlds, library, tmp_path, by, from_device):
    worlds.run(2, cases.loaded_on_the_other, library, by, tmp_path / "saved", from_device)


def test_checkpoints_go_to_other_numbers_of_ranks(worlds, library, tmp_path):
    saved = worlds.run(4, cases.saved_on_device, library, tmp_path / "saved")[0]
    cases.assert_equal(worlds.run(2, cases.loaded_on_cpu, tmp_path / "saved")[0], saved)


def test_a_planner_of_torchrecs_topology(worlds, library):
    worlds.run(2, cases.planned, library)


def test_ids_out_of_range_are_told_with_a_later_batch(worlds, library):
    worlds.run(2, cases.bad_ids, library)


REFUSED = {
    "tier": (r"keeps tables in the hosts' memory \(.*\), which engines on .* without `tier`",) * 2,
    "two nodes": (r"a row for each access, and the ranks are on 2 nodes: .*fetch='dis",) * 2,
    "mixed": (r"the tables of rank 1 are on the CPU, and those of rank 0 on CUDA devices",) * 2,
    "absent": (r"rank 1 failed: device cuda:7: there", r"^device cuda:7: there"),
    "no gloo": (r"expected a backend for the CPU, got .*cpu:gloo,cuda:nccl",) * 2,
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("how", ["shard", "parallel"])
def test_what_devices_cannot_do_is_named_on_all_ranks(emulated, what, how):
    if what == "absent" and torch.cuda.device_count() > 7:
        pytest.skip("there is a device 7")
    outcomes: list[Any] = mortal_ranks.run(2, cases.refused, str(emulated), what, how)
    for outcome, expected in zip(outcomes, REFUSED[what], strict=True):
        assert isinstance(outcome, OperError), outcome
        assert re.search(expected, str(outcome)), outcome


# What tests/torchrec serves on CPU ranks, and devices can do (docs/gpu.md).
AGAIN: dict[str, tuple[Any, ...]] = {
    "served fp32": (sharder_cases.served, "fp32", 1e-5),
    "served int8": (sharder_cases.served, "int8", 0.05),
    "outputs": (sharder_cases.outputs,),
    "memory of parts": (sharder_cases.memory_of_parts,),
    "unlike models": (sharder_cases.unlike_models,),
    "weights of a batch": (sharder_cases.unweighted,),
    "pipeline": (training_cases.pipelined, "EvalPipelineSparseDist"),
    "dictionaries of tensors": (training_cases.tensor_dict,),
    "state dicts of others": (checkpoint_cases.loaded,),
    "distributed tensors": (checkpoint_cases.loaded_from_dtensors,),
    "rank 0's weights": (checkpoint_cases.rank_zeros_weights,),
    "plans for others": (refusal_cases.refused_plans,),
}


@pytest.mark.check
@pytest.mark.parametrize("name", AGAIN)
def test_what_cpu_ranks_do_devices_do(worlds, emulated, name):
    function, *arguments = AGAIN[name]
    worlds.run(2, cases.on_emulated, str(emulated), function, *arguments)


@pytest.mark.check
def test_plans_come_from_folders(worlds, emulated, tmp_path):
    plan = random_plan(1, tables_of(Model("meta")), 2, mode="inference")
    plan = replace(plan, topology=Topology.load("cpu:2"), profile="made for this test")
    plan.save(tmp_path / "plan")
    given = (cases.on_emulated, str(emulated), sharder_cases.from_folder, tmp_path / "plan")
    worlds.run(2, *given)


# What tests/torchrec trains.
TRAINED: dict[str, tuple[Any, ...]] = {
    **{
        f"trains by {kind}": (training_cases.train_and_compare, kind, 0.3)
        for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
    },
    **{
        name: (training_cases.pipelined, name)
        for name in ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")
    },
    "TrainPipelineSemiSync": (training_cases.semi_synchronous,),
    "learning rates": (training_cases.scheduled,),
    "accumulated gradients": (training_cases.accumulated,),
    "parameters": (training_cases.parameters,),
    "frozen tables": (training_cases.frozen,),
    "tables frozen later": (frozen_cases.toggled, "adam"),
    "tables frozen in forward or backward": (frozen_cases.around_forward,),
    "tables frozen while gradients are held": (frozen_cases.accumulated,),
    "unlike frozen tables": (frozen_cases.unlike, True),
    "unlike learning rates": (equal_settings_cases.unlike_rates, "adagrad"),
    "counters": (training_cases.counted,),
    "dictionaries of tensors": (training_cases.tensor_dict,),
    "a freed graph": (training_cases.freed,),
    "states loaded": (checkpoint_cases.loaded,),
    "states written in place": (checkpoint_cases.written_in_place, "adagrad"),
    "mixed optimizers": (mixed_optimizer_cases.interrupted, test_mixed_optimizers.MIXED, 0.3),
}


@pytest.mark.check
@pytest.mark.parametrize("name", TRAINED)
def test_what_cpu_ranks_train_devices_train(worlds, emulated, name):
    function, *arguments = TRAINED[name]
    worlds.run(2, cases.trained_on_emulated, str(emulated), function, *arguments)


# And what devices of two nodes train: pipelines prepare batches ahead, on other streams, and ranks
# exchange rows in between.
BETWEEN_NODES = [
    "trains by adagrad",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSemiSync",
    "learning rates",
    "accumulated gradients",
    "frozen tables",
    "tables frozen later",
    "unlike learning rates",
    "dictionaries of tensors",
    "states loaded",
    "mixed optimizers",
]


@pytest.mark.check
@pytest.mark.parametrize("name", BETWEEN_NODES)
def test_devices_of_two_nodes_train(worlds, emulated, name):
    function, *arguments = TRAINED[name]
    worlds.run(2, cases.trained_between_nodes, str(emulated), function, *arguments)


@pytest.mark.check
@pytest.mark.parametrize("case", ["default", "mean", "zero batch", "apply optimizer"])
def test_torchrecs_own_parity(worlds, emulated, case):
    on_devices = (cases.trained_on_emulated, str(emulated))
    test_parity.Parity(worlds, *on_devices).check(**test_parity.CASES[case])


@pytest.mark.check
def test_ranks_of_torchrun_name_the_one_that_is_killed(emulated, tmp_path):
    test_killed_under_torchrun.kill_one(tmp_path, 1, str(emulated))


@pytest.mark.check
@pytest.mark.parametrize("dense", [False, True])
def test_training_resumes_on_a_device(worlds, emulated, tmp_path, dense):
    given = (cases.trained_on_emulated, str(emulated), checkpoint_cases.resumed)
    worlds.run(2, *given, tmp_path / "saved", dense)


@pytest.mark.check
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, "trains"), (1, "accumulates"), (2, "trains"), (2, "accumulates"), (2, "moves")],
)
def test_deltas_of_devices_have_the_bits_of_whole_saves(worlds, emulated, tmp_path, ranks, how):
    given = (cases.trained_on_emulated, str(emulated), delta_cases.saved_in_links, "adam", tmp_path)
    options: dict[str, Any] = {} if how == "trains" else {how: True}
    options |= {"spare": 1.0} if how == "moves" else {}
    worlds.run(ranks, *given, **options)
    test_deltas.assert_whole(tmp_path)


@pytest.mark.check
def test_deltas_of_devices_of_two_nodes_have_the_bits_of_whole_saves(worlds, emulated, tmp_path):
    given = (cases.trained_between_nodes, str(emulated), delta_cases.saved_in_links)
    worlds.run(2, *given, "rowwise_adagrad", tmp_path)
    test_deltas.assert_whole(tmp_path)
