"""The optimizers of embedding tables: their settings, the state of a slot, the update of rows.

An optimizer sees each row's whole gradient once per step, summed over the ranks, and touches only
the rows that have one; their owners apply it (OPER, §5). With w a row, g its gradient, D its
dimension, t the number of the step from 1, m and v the parts of its state:

    sgd                   w -= lr·g
    momentum_sgd          m = momentum·m + g;  w -= lr·m
    adagrad               m += g²;  w -= lr·g / (√m + eps)
    rowwise_adagrad       m += Σg²/D;  w -= lr·g / (√m + eps)
    adam                  m = β₁·m + (1-β₁)·g;  v = β₂·v + (1-β₂)·g²;
                          w -= lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)
    partial_rowwise_adam  adam with v = β₂·v + (1-β₂)·Σg²/D

Weight decay puts g + decay·w in the place of g (L2), or, decoupled, takes lr·decay·w off w as well.
These are FBGEMM's fused sparse optimizers; SGD with momentum or decay and Adagrad with decay, which
FBGEMM has not, are torch.optim's on the touched rows. State is fp32. Rows in fp16 and bf16 are
rounded to the nearest, or, with `stochastic_rounding`, at random to one of the two neighbours, so
that the expected row is the unrounded one. The random bits are a function of the number of the
step, the row's slot and the value's place in the row: equal runs give equal bits, copies of a row
on several ranks stay equal, and nothing is to be kept but the number of steps.

The kernels are csrc/include/oper/step/optimizers.h and stochastic_rounding.h.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oper.base import native
from oper.base.errors import OperError
from oper.base.native import Kernels
from oper.base.units import finite_number, whole_number
from oper.runtime.tables.kernel_structs import DTYPE_CODE
from oper.runtime.tables.row_gradients import RowGradients

logger = logging.getLogger(__name__)

VALUE_BYTES = 4  # state is float32, whatever the rows are


@dataclass(frozen=True)
class State:
    """A part of an optimizer's state, float32: [rows, dim], or [rows] if it is row-wise."""

    name: str
    rowwise: bool = False

    def values(self, dim: int) -> int:
        """Return the number of values of one row."""
        return 1 if self.rowwise else dim


# Named as in TorchRec's KeyedOptimizer ("TABLE.momentum1"): the first is momentum1 everywhere.
STATES: dict[str, tuple[State, ...]] = {
    "none": (),
    "sgd": (),
    "momentum_sgd": (State("momentum1"),),
    "adagrad": (State("momentum1"),),
    "rowwise_adagrad": (State("momentum1", rowwise=True),),
    "adam": (State("momentum1"), State("exp_avg_sq")),
    "partial_rowwise_adam": (State("momentum1"), State("exp_avg_sq", rowwise=True)),
}
for _kind, _states in STATES.items():
    if _kind != "none":
        _parts = (f"{state.name}[{1 if state.rowwise else 'dim'}]" for state in _states)
        native.shared(f"optimizer {_kind}", ", ".join(_parts))


class StepSettings(NamedTuple):
    """An optimizer's settings of one step, as the kernel takes them."""

    lr: float
    eps: float
    l2: float  # weight decay as a part of the gradient
    shrink: float  # factor of decoupled weight decay: 1 - lr·decay
    beta1: float  # momentum, for SGD
    beta2: float
    step_size: float  # lr / (1 - beta1^step)
    root_scale: float  # 1 / √(1 - beta2^step)
    rounding_step: float  # the step's number if 16-bit rows are rounded at random, else 0


native.shared("struct StepSettings", np.dtype([(name, float) for name in StepSettings._fields]))


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a table. Kind "none" is for frozen tables, which have no step.

    `lr` is the initial learning rate. `stochastic_rounding` applies to rows in fp16 and bf16, and
    changes nothing for others. All other defaults are FBGEMM's; by default FBGEMM rounds at random
    on GPUs, and to the nearest on CPUs.
    """

    kind: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False  # how the weight decays
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.kind not in STATES:
            supported = ", ".join(kind for kind in STATES if kind != "none")
            raise OperError(f"optimizer {self.kind!r} is not supported; choose one of {supported}")
        for name, number in (
            ("learning_rate", self.lr),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
            ("momentum", self.momentum),
        ):
            if finite_number(number, name) < 0:
                raise OperError(f"{name}: expected a number of at least 0, got {number:g}")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise OperError(
                    f"optimizer {self.kind}: expected betas of at least 0 and below 1, got {beta}"
                )

        if not isinstance(self.stochastic_rounding, bool):
            raise OperError(
                f"stochastic_rounding: expected True or False, got {self.stochastic_rounding!r}"
            )

    def for_rows(self, dtype: str) -> "Optimizer":
        """Return the optimizer for rows of this dtype: fp32 rows are never rounded."""
        return replace(self, stochastic_rounding=False) if dtype == "fp32" else self

    @property
    def corrects_bias(self) -> bool:
        """True if steps are Adam's, which depend on the number of earlier steps."""
        return self.kind in ("adam", "partial_rowwise_adam")

    @property
    def counts_steps(self) -> bool:
        """True if the number of steps is a part of the state that a checkpoint needs."""
        return self.corrects_bias or (self.stochastic_rounding and self.kind != "none")

    @property
    def states(self) -> tuple[State, ...]:
        """The parts of a slot's state, in the order in which they lie there."""
        return STATES[self.kind]

    def state_bytes(self, dim: int) -> int:
        """Return the bytes of state of a slot."""
        return VALUE_BYTES * sum(state.values(dim) for state in self.states)

    def state_slices(self, dim: int) -> dict[str, slice]:
        """Return the place of each part in a slot's state, in float32 values."""
        slices, first = {}, 0
        for state in self.states:
            slices[state.name] = slice(first, first + state.values(dim))
            first += state.values(dim)
        return slices

    def settings(self, lr: float, step: int) -> StepSettings:
        """Return the kernel's settings for step number `step`, from 1, at learning rate `lr`."""
        beta1, beta2 = self.betas
        correction1 = correction2 = 1.0
        if self.kind == "momentum_sgd":
            beta1 = self.momentum
        if self.counts_steps and step < 1:
            raise OperError(f"optimizer {self.kind}: step {step}, and steps count from 1")
        if self.corrects_bias:
            correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        l2, decoupled = self.weight_decay, 0.0
        if self.decoupled:
            l2, decoupled = decoupled, l2
        return StepSettings(
            lr=lr,
            eps=self.eps,
            l2=l2,
            shrink=1 - lr * decoupled,
            beta1=beta1,
            beta2=beta2,
            step_size=lr / correction1,
            root_scale=correction2**-0.5,
            rounding_step=step if self.stochastic_rounding else 0,
        )

    @classmethod
    def of_torch(
        cls,
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: Mapping[str, Any],
        fused_params: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = logger.warning,
    ) -> "Optimizer":
        """Return the optimizer that `apply_optimizer_in_backward` gave a table.

        As in TorchRec, settings that `kwargs` leave open are taken from the sharder's
        `fused_params`, or else from FBGEMM's defaults (learning rate 0.01), not from the class's
        own. Weight decay is L2 for SGD and Adagrad, and decoupled for Adam, as in FBGEMM.

        Raises:
            OperError: names a class or a setting that is not supported.
        """
        name = optimizer_class.__name__
        if name not in _CLASSES:
            raise OperError(
                f"optimizer {optimizer_class.__module__}.{name} is not supported for tables; take "
                f"one of {', '.join(_CLASSES)} of torch.optim or torchrec.optim"
            )
        settings = dict(kwargs)
        fbgemm = str(settings.pop("optimizer", _CLASSES[name]))  # TorchRec notes its choice there
        if "lr" in settings:
            settings["learning_rate"] = settings.pop("lr")
        if "betas" in settings:
            settings["beta1"], settings["beta2"] = settings.pop("betas")
        arguments = inspect.signature(optimizer_class).parameters
        known = _FBGEMM_DEFAULTS.keys() | OTHER_SETTINGS | _WITHOUT_EFFECT.keys()
        known |= {"stochastic_rounding"}
        for setting in sorted(settings.keys() - known):
            value = settings.pop(setting)
            if setting not in arguments or value != arguments[setting].default:
                raise _unsupported(setting, value, name)
        more: dict[str, Any] = {}  # that torch.optim's have and FBGEMM's have not
        if fbgemm == "exact_sgd" and (
            momentum := finite_number(settings.pop("momentum", 0.0), "momentum")
        ):
            more = {"kind": "momentum_sgd", "momentum": momentum}
        if fbgemm in ("exact_sgd", "exact_adagrad"):
            more["weight_decay"] = finite_number(settings.pop("weight_decay", 0.0), "weight_decay")
        base = {k: v for k, v in (fused_params or {}).items() if k not in settings}
        return replace(cls.of_fused(base | settings | {"optimizer": fbgemm}, warn), **more)

    @classmethod
    def of_fused(
        cls, fused_params: Mapping[str, Any], warn: Callable[[str], None] = logger.warning
    ) -> "Optimizer":
        """Return the optimizer of a TorchRec sharder's `fused_params`, which are FBGEMM's settings.

        Settings that the sharders read are passed over. Rows are rounded at random only if
        `stochastic_rounding` is given: FBGEMM's default is True, and has no effect on CPUs. `warn`
        is called with settings without effect.

        Raises:
            OperError: names an optimizer or a setting that is not supported.
        """
        check_without_effect(fused_params)
        others = OTHER_SETTINGS | _WITHOUT_EFFECT.keys()
        settings = {k: v for k, v in fused_params.items() if k not in others}
        stochastic_rounding = settings.pop("stochastic_rounding", False)
        name = str(settings.pop("optimizer", "exact_sgd"))
        if name not in _KINDS:
            raise OperError(
                f"optimizer {name} is not supported for tables; take one of {', '.join(_KINDS)}"
            )
        kind, reads = _KINDS[name]
        for setting, value in settings.items():
            if setting in reads or value == _FBGEMM_DEFAULTS.get(setting, _UNKNOWN):
                continue
            if setting not in _OF_SOME or (setting, name) == ("momentum", "exact_sgd"):
                raise _unsupported(setting, value, name)
            warn(f"{setting}={value!r} has no effect on optimizer {name}")
        value = _FBGEMM_DEFAULTS | {k: v for k, v in settings.items() if k in reads}
        mode = whole_number(value["weight_decay_mode"], "weight_decay_mode")
        lr, eps, decay, beta1, beta2 = (
            finite_number(value[name], name)
            for name in ("learning_rate", "eps", "weight_decay", "beta1", "beta2")
        )
        if mode not in (_NO_DECAY, _DECOUPLE) and not (kind == "rowwise_adagrad" and mode == _L2):
            raise _unsupported("weight_decay_mode", value["weight_decay_mode"], name)
        if kind == "rowwise_adagrad" and decay and mode == _NO_DECAY:
            raise OperError(
                f"weight_decay={decay} has no effect on FBGEMM's {name} without a "
                "weight_decay_mode; give WeightDecayMode.L2 or .DECOUPLE, or no weight_decay"
            )
        return cls(
            kind=kind,
            lr=lr,
            eps=eps,
            weight_decay=decay,
            decoupled=decay != 0 and mode != _L2,
            betas=(beta1, beta2),
            stochastic_rounding=stochastic_rounding,
        )


# FBGEMM's WeightDecayMode.
_NO_DECAY, _L2, _DECOUPLE = 0, 1, 2

# FBGEMM's name of each optimizer: its kind here, and the settings it reads.
_ADAM_READS = {"learning_rate", "eps", "weight_decay", "weight_decay_mode", "beta1", "beta2"}
_KINDS: dict[str, tuple[str, set[str]]] = {
    "exact_sgd": ("sgd", {"learning_rate"}),
    "exact_adagrad": ("adagrad", {"learning_rate", "eps"}),
    "exact_row_wise_adagrad": ("rowwise_adagrad", _ADAM_READS - {"beta1", "beta2"}),
    "adam": ("adam", _ADAM_READS),
    "partial_row_wise_adam": ("partial_rowwise_adam", _ADAM_READS),
}

# FBGEMM's names of the classes of torch.optim and TorchRec, as TorchRec maps them.
_CLASSES = {
    "SGD": "exact_sgd",
    "Adagrad": "exact_adagrad",
    "RowWiseAdagrad": "exact_row_wise_adagrad",
    "Adam": "adam",
    "PartialRowWiseAdam": "partial_row_wise_adam",
}

# FBGEMM's settings of optimizers. Settings that change nothing at their defaults are refused with
# other values.
_FBGEMM_DEFAULTS: dict[str, Any] = {
    "learning_rate": 0.01,
    "eps": 1e-8,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "weight_decay_mode": _NO_DECAY,
    "beta1": 0.9,
    "beta2": 0.999,
    "eta": 0.001,
    "optimizer_state_dtypes": None,
    "ensemble_mode": None,
    "emainplace_mode": None,
    "counter_based_regularization": None,
    "cowclip_regularization": None,
    "global_weight_decay": None,
    "extra_optimizer_config": None,
}

# Settings that some of FBGEMM's optimizers do not read, whatever their value.
_OF_SOME = {"eps", "momentum", "beta1", "beta2", "eta"}

_UNKNOWN = object()

# Settings of `fused_params` that the sharders read themselves.
OTHER_SETTINGS = {"output_dtype", "weights_precision", "bounds_check_mode"}

_CACHE = "caches rows of tables in the tier: plan with a tier and give cache=oper.CacheSettings(…)"
_READS_AHEAD = "prepares a batch ahead in TorchRec's TrainPipelineSparseDist, without a setting"
_COUNTS = "counts what it reads: see oper.counters and oper.monitor"
_CLIPS = "clips no gradients of tables: lower learning_rate, or clip those of the lookup's output"

# FBGEMM's settings of other things than optimizers that OPER has no use for: the values that change
# nothing, and the remedy for other values, after "OPER".
_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_algorithm": ((0, None), _CACHE),
    "cache_load_factor": ((0.2, None), _CACHE),
    "cache_precision": ((None,), _CACHE),
    "cache_reserved_memory": ((0.0, None), _CACHE),
    "cache_sets": ((0, None), _CACHE),
    "enforce_hbm": ((False, None), "keeps rows on the devices unless a plan has a tier"),
    "gather_uvm_cache_stats": ((False, None), _COUNTS),
    "record_cache_metrics": ((None,), _COUNTS),
    "stats_reporter_config": ((None,), _COUNTS),
    "multipass_prefetch_config": ((None,), _READS_AHEAD),
    "prefetch_pipeline": ((False, None), _READS_AHEAD),
    "use_experimental_tbe": ((False, None), "has kernels of its own"),
    "uvm_host_mapped": ((False, None), _CACHE),
    "uvm_non_rowwise_momentum": ((False, None), _CACHE),
    "gradient_clipping": ((False,), _CLIPS),
    "max_gradient": ((1.0,), _CLIPS),
    "max_norm": ((0.0,), "bounds no norms of rows: take weight_decay"),
    "embedding_table_index_type": ((torch.int64,), "takes ids of 32 and 64 bits in any batch"),
    "embedding_table_offset_type": ((torch.int64,), "takes offsets of 32 and 64 bits in any batch"),
    "table_names": ((None,), "names tables by their configs"),
    "pooling_mode": ((), "takes pooling from the tables' configs"),
    "device": ((), "takes the device that oper.shard or DistributedModelParallel is given"),
}


# FBGEMM's names of torch.optim's settings.
_OF_TORCH = {
    "lr": "learning_rate",
    "betas": "beta1 and beta2",
}


def check_without_effect(fused_params: Mapping[str, Any]) -> None:
    """Raise OperError if a setting of FBGEMM for which OPER has no use differs from its value
    without effect."""
    for setting in sorted(fused_params.keys() & _WITHOUT_EFFECT.keys()):
        value, (harmless, remedy) = fused_params[setting], _WITHOUT_EFFECT[setting]
        number = getattr(value, "value", value)  # of an enumeration
        alike = [one for one in harmless if isinstance(one, bool) == isinstance(number, bool)]
        if number not in alike:
            raise OperError(
                f"{setting}={value!r}: expected settings without it, because OPER {remedy}"
            )


def _unsupported(setting: str, value: Any, optimizer: str) -> OperError:
    what_to_do = "leave it out"
    if setting not in _FBGEMM_DEFAULTS:
        near = get_close_matches(setting, _FBGEMM_DEFAULTS, 1)
        if named := _OF_TORCH.get(setting, near[0] if near else ""):
            what_to_do = f"FBGEMM's name is {named}: give that"
    return OperError(
        f"{setting}={value!r} is not supported for tables with optimizer {optimizer}; {what_to_do}"
    )


def update_rows(
    optimizer: Optimizer,
    parts: Sequence[RowGradients],
    groups: Sequence[int],
    rows: Tensor,
    state: Tensor,
    dim: int,
    dtype: str,
    lr: float,
    step: int,
    updated: Tensor,
    on: Kernels,
    marks: Tensor | None = None,
    packed: Tensor | None = None,
) -> None:
    """Sum the gradients of each row over the parts, in their order, and update the row once.

    Args:
        parts: the gradients of each rank.
        groups: which group of each part to take.
        rows, state: arenas, uint8 [slots, bytes], written to.
        dtype: of the rows' values: fp32, fp16 or bf16.
        lr: the learning rate of this step.
        step: the number of this step, from 1.
        updated: int64 [1], to which the number of rows updated is added.
        on: the device of all these tensors.
        marks: bool [slots], set for rows that are updated.
        packed: on a device, memory that has the step's settings (`packed_settings`) when it is
            run; those of `lr` and `step` then have no effect.
    """
    on.ops().update_rows(
        [part.slots for part in parts],
        [part.values for part in parts],
        [part.groups for part in parts],
        groups,
        rows,
        state,
        dim,
        DTYPE_CODE[dtype],
        optimizer.kind,
        optimizer.settings(lr, step),
        updated,
        on.stream,
        marks,
        packed,
    )


def packed_settings(settings: StepSettings) -> Tensor:
    """Return settings as kernels take them from a device's memory, int64 [words], on the host."""
    packed: Tensor = native.ops().pack_settings(settings)
    return packed
