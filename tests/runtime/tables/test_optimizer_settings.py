"""Settings of optimizers as torch, TorchRec and fused parameters state them, and those refused."""

import inspect

import numpy as np
import pytest
import torch

from oper.base.errors import OperError
from oper.runtime.tables.optimizers import OTHER_SETTINGS, Optimizer


def test_optimizers_of_torch():
    of, torch_optim = Optimizer.of_torch, torch.optim
    # What is not given is FBGEMM's default, as in TorchRec.
    assert of(torch_optim.SGD, {}) == Optimizer("sgd", lr=0.01)
    assert of(torch_optim.SGD, {"lr": 0.5, "momentum": 0.0}) == Optimizer("sgd", lr=0.5)
    assert of(torch_optim.SGD, {"lr": 1, "momentum": 0.7, "weight_decay": 0.1}) == Optimizer(
        "momentum_sgd", lr=1.0, momentum=0.7, weight_decay=0.1
    )
    assert of(torch_optim.Adagrad, {"eps": 0.2, "weight_decay": 0.1}) == Optimizer(
        "adagrad", eps=0.2, weight_decay=0.1
    )
    adam = {"betas": (0.5, 0.6), "weight_decay": 0.1, "amsgrad": False, "foreach": None}
    assert of(torch_optim.Adam, adam) == Optimizer(
        "adam", betas=(0.5, 0.6), weight_decay=0.1, decoupled=True
    )
    # A sharder's fused parameters hold where the table's own do not say.
    fused = {"learning_rate": 0.3, "eps": 0.2, "output_dtype": "anything"}
    assert of(torch_optim.Adagrad, {"lr": 0.4}, fused) == Optimizer("adagrad", lr=0.4, eps=0.2)
    reordered = dict(reversed(adam.items()))
    assert len({of(torch_optim.Adam, adam), of(torch_optim.Adam, reordered)}) == 1


def test_optimizers_of_torchrec():
    optim = pytest.importorskip("torchrec.optim")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    of, kinds = Optimizer.of_torch, configs.EmbOptimType
    assert of(optim.SGD, {"lr": 0.5}) == Optimizer("sgd", lr=0.5)
    assert of(optim.RowWiseAdagrad, {"lr": 0.5, "eps": 0.1, "lr_decay": 0.0}) == Optimizer(
        "rowwise_adagrad", lr=0.5, eps=0.1
    )
    decayed = {"weight_decay": 0.1, "weight_decay_mode": 1}
    assert of(optim.RowWiseAdagrad, decayed) == Optimizer("rowwise_adagrad", weight_decay=0.1)
    assert of(optim.Adam, {"beta1": 0.5, "lr": 0.1}) == Optimizer(
        "adam", lr=0.1, betas=(0.5, 0.999)
    )
    assert of(optim.PartialRowWiseAdam, {}) == Optimizer("partial_rowwise_adam")
    # TorchRec's sharding renames what it was given, in place.
    renamed = {"optimizer": kinds.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    assert of(optim.RowWiseAdagrad, renamed) == Optimizer("rowwise_adagrad", lr=0.5)
    assert Optimizer.of_fused(renamed) == Optimizer("rowwise_adagrad", lr=0.5)
    with pytest.raises(OperError, match="LAMB is not supported"):
        of(optim.LAMB, {})
    with pytest.raises(OperError, match="lamb is not supported"):
        Optimizer.of_fused({"optimizer": kinds.LAMB})


def test_optimizers_of_fused_params(caplog):
    of = Optimizer.of_fused
    assert of({}) == Optimizer("sgd", lr=0.01)
    assert of({"optimizer": "exact_sgd", "weight_decay": 0.0, "cache_load_factor": 0.2}) == of({})
    adam = {"optimizer": "adam", "weight_decay": 0.1}
    assert of(adam) == Optimizer("adam", weight_decay=0.1, decoupled=True)
    rowwise = {"optimizer": "exact_row_wise_adagrad", "weight_decay": 0.1, "weight_decay_mode": 2}
    assert of(rowwise) == Optimizer("rowwise_adagrad", weight_decay=0.1, decoupled=True)
    assert not caplog.records
    assert of({"eps": 0.5, "learning_rate": 0.1}) == Optimizer("sgd", lr=0.1)
    assert "eps=0.5 has no effect on optimizer exact_sgd" in caplog.text


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"learning_rat": 0.1}, "learning_rat=0.1 is not .* FBGEMM's name is learning_rate: give"),
        ({"lr": 0.1}, "lr=0.1 is not supported .* FBGEMM's name is learning_rate: give that"),
        ({"optimizer": "adam", "betas": (0.9, 0.99)}, "FBGEMM's name is beta1 and beta2"),
        ({"nesterov": True}, "nesterov=True is not supported .*; leave it out"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 is not supported .* exact_sgd"),
        ({"momentum": 0.5}, "momentum=0.5 is not supported"),
        ({"gradient_clipping": True, "max_gradient": 2.0}, "gradient_clipping=True"),
        ({"max_norm": 1.0}, "max_norm=1.0"),
        ({"optimizer": "none"}, "optimizer none is not supported"),
        ({"optimizer": "adam", "weight_decay_mode": 1}, "weight_decay_mode=1"),
        ({"optimizer": "adam", "beta1": 1.0}, "expected betas of at least 0 and below 1, got 1.0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a finite number, got 'nan'"),
        ({"learning_rate": float("inf")}, "learning_rate: expected a finite number, got 'inf'"),
        ({"learning_rate": "0.1"}, "learning_rate: expected a finite number, got '0.1'"),
        ({"learning_rate": None}, "learning_rate: expected a finite number, got 'None'"),
        ({"learning_rate": -1}, "learning_rate: expected a number of at least 0, got -1"),
        ({"optimizer": "adam", "eps": -1e-8}, "eps: expected a number of at least 0, got -1e-08"),
        (
            {"optimizer": "adam", "weight_decay": float("nan")},
            "weight_decay: expected a finite number, got 'nan'",
        ),
        ({"optimizer": "adam", "beta2": "0.9"}, "beta2: expected a finite number, got '0.9'"),
        (
            {"optimizer": "adam", "weight_decay_mode": "l2"},
            "weight_decay_mode: expected a whole number, got 'l2'",
        ),
        (
            {"optimizer": "exact_row_wise_adagrad", "weight_decay": 0.1},
            "no effect .* without a weight_decay_mode",
        ),
        (
            {"optimizer": "exact_row_wise_adagrad", "weight_decay_mode": 3},
            "weight_decay_mode=3 is not supported",
        ),
    ],
)
def test_fused_params_that_are_not_supported(fused_params, message):
    with pytest.raises(OperError, match=message):
        Optimizer.of_fused(fused_params)


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "message"),
    [
        (torch.optim.RMSprop, {}, "RMSprop is not supported"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "nesterov=True"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "dampening=0.5"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "initial_accumulator_value=0.1"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.Adam, {"gradient_clipping": True}, "gradient_clipping=True"),
        (
            torch.optim.Adam,
            {"lr": float("nan")},
            "learning_rate: expected a finite number, got 'nan'",
        ),
        (
            torch.optim.SGD,
            {"momentum": -0.5},
            "momentum: expected a number of at least 0, got -0.5",
        ),
        (torch.optim.SGD, {"momentum": "0.5"}, "momentum: expected a finite number, got '0.5'"),
        (
            torch.optim.SGD,
            {"weight_decay": -0.5},
            "weight_decay: expected a number of at least 0, got -0.5",
        ),
    ],
)
def test_optimizers_of_torch_that_are_not_supported(optimizer_class, kwargs, message):
    with pytest.raises(OperError, match=message):
        Optimizer.of_torch(optimizer_class, kwargs)


def test_numbers_of_torch_and_numpy_are_taken():
    assert Optimizer.of_fused({"learning_rate": np.float32(0.5)}) == Optimizer("sgd", lr=0.5)
    assert Optimizer.of_torch(torch.optim.SGD, {"lr": torch.tensor(0.5)}).lr == 0.5
    assert Optimizer.of_fused({"learning_rate": 0}).lr == 0


def test_bad_settings():
    with pytest.raises(OperError, match="'rmsprop' is not supported; choose one of sgd"):
        Optimizer("rmsprop")
    with pytest.raises(OperError, match="step 0, and steps count from 1"):
        Optimizer("adam").settings(0.1, 0)


def test_stochastic_rounding_is_asked_for():
    of, asked = Optimizer.of_fused, {"stochastic_rounding": True}
    assert not of({}).stochastic_rounding
    assert of(asked) == Optimizer("sgd", stochastic_rounding=True)
    assert of({"stochastic_rounding": False}) == of({})
    assert Optimizer.of_torch(torch.optim.Adagrad, {}, asked).stochastic_rounding
    assert of(asked).for_rows("fp16") == of(asked).for_rows("bf16") == of(asked)
    assert of(asked).for_rows("fp32") == of({})
    assert of(asked).settings(0.1, 7).rounding_step == 7
    assert of({}).settings(0.1, 7).rounding_step == 0
    assert of(asked).counts_steps
    assert not of({}).counts_steps
    with pytest.raises(OperError, match="steps count from 1"):
        of(asked).settings(0.1, 0)
    with pytest.raises(OperError, match="stochastic_rounding: expected True or False, got 'yes'"):
        of({"stochastic_rounding": "yes"})


# Other than their defaults, of the arguments whose default says nothing of their type.
_VALUES = {"stochastic_rounding": True, "optimizer": "adam", "weight_decay_mode": 1}


def _fbgemm_arguments() -> list[str]:
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    made = training.SplitTableBatchedEmbeddingBagsCodegen
    return [name for name in inspect.signature(made.__init__).parameters if name != "self"]


@pytest.mark.parametrize("name", _fbgemm_arguments())
@pytest.mark.parametrize("kind", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
def test_every_setting_of_fbgemms_is_read_or_named(name, kind):
    """None is passed over without a word."""
    if name in OTHER_SETTINGS:  # which the sharders look after
        return
    base = {"optimizer": kind}
    if name == "weight_decay_mode":
        base |= {"weight_decay": 0.1}
    if kind == "exact_row_wise_adagrad":
        base |= {"weight_decay_mode": 2}
    given = base | {name: _VALUES.get(name, 0.375)}
    said: list[str] = []
    outcome: list[object] = []
    for settings in (base, given):
        try:
            outcome.append(Optimizer.of_fused(settings, said.append))
        except OperError as error:
            said.append(str(error))
    assert len(outcome) < 2 or outcome[0] != outcome[1] or name in " ".join(said) or given == base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gradient": 0.5}, "max_gradient=0.5: .* clips no gradients"),
        ({"cache_load_factor": 0.5}, "cache_load_factor=0.5: .*oper.CacheSettings"),
        ({"enforce_hbm": True}, "enforce_hbm=True"),
        ({"cache_sets": False}, "cache_sets=False"),
        ({"prefetch_pipeline": True}, "prefetch_pipeline=True: .*TrainPipelineSparseDist"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    for make in (Optimizer.of_fused, lambda given: Optimizer.of_torch(torch.optim.SGD, given)):
        with pytest.raises(OperError, match=message):
            make(settings)


def test_settings_that_change_nothing_are_taken():
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    harmless = {"cache_algorithm": training.CacheAlgorithm.LRU, "max_gradient": 1, "max_norm": 0.0}
    harmless |= {"gather_uvm_cache_stats": False, "record_cache_metrics": None}
    assert Optimizer.of_fused(harmless) == Optimizer.of_fused({})
