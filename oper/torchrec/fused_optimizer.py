"""Optimizers of a module's tables in TorchRec's form: KeyedOptimizers that step in backward.

One for each bucket (tables with the same settings). Learning rates are set through `param_groups`
and take effect with `step` and `zero_grad`, as in TorchRec; schedules and warm-up work. State dicts
have TorchRec's keys: `embedding_bags.TABLE.weight` -> `TABLE.momentum1`, `TABLE.exp_avg_sq`; Adam's
number of steps, which an exact continuation from a checkpoint needs, is stored with them as
`TABLE.iter`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from oper.base.errors import OperError
from oper.base.units import finite_number
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.tables.optimizers import State
from oper.torchrec.state_dict import STEPS, TableBlocks
from oper.torchrec.uncopied import Uncopied

# Settings that torch's optimizers read from their groups. Groups of tables have none of them, so a
# script must have set those that are present.
_FIXED = {
    "amsgrad",
    "betas",
    "dampening",
    "eps",
    "foreach",
    "lr_decay",
    "maximize",
    "momentum",
    "nesterov",
    "weight_decay",
}


class TableState:
    """State of one table's optimizer, as a value in an optimizer's `state`.

    CombinedOptimizer reads and loads values with these two methods through them, and all other
    values directly.
    """

    def __init__(self, blocks: TableBlocks, table: int, state: State) -> None:
        self._blocks, self._table, self._state = blocks, table, state

    def state_dict(self) -> Any:
        """Return a copy, in blocks of rows: see TableBlocks."""
        return self._blocks.read([self._table], self._state)[0]

    def load_state_dict(self, value: Any) -> None:
        self._blocks.write({self._table: value}, self._state)


class StepCount:
    """Number of steps for Adam's bias corrections, as a state of one table."""

    def __init__(self, blocks: TableBlocks, table: int) -> None:
        self._blocks, self._table = blocks, table

    def state_dict(self) -> torch.Tensor:
        return self._blocks.read_steps(self._table)

    def load_state_dict(self, value: torch.Tensor) -> None:
        self._blocks.write_steps(value)


class TableOptimizers(CombinedOptimizer):
    """Optimizers of all tables of a model."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the parameters' names."""
        states = super().state_dict()
        return states | {"state": _StatesByName(states["state"])}


class _StatesByName(dict[str, Any]):
    """States by the parameters' names. `get_optimizer_state_dict` of torch expects numbers in
    state dicts and would replace the names by numbers, which no optimizer of TorchRec loads."""

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise OperError(
                "get_optimizer_state_dict: expected an optimizer of the dense part, got the "
                "tables' fused_optimizer, whose states have names: call "
                "model.fused_optimizer.state_dict(), or oper.save(model, folder)"
            )
        super().__setitem__(name, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class BucketOptimizer(Uncopied, FusedOptimizer):
    """Optimizer of tables that share settings.

    `params` maps keys to the empty parameters; `tables` maps the same keys to the numbers of the
    parameters' tables.
    """

    def __init__(
        self,
        engine: EmbeddingEngine,
        blocks: TableBlocks,
        bucket: int,
        params: Mapping[str, nn.Parameter],
        tables: Mapping[str, int],
    ) -> None:
        self._engine, self._blocks, self._bucket = engine, blocks, bucket
        settings = engine.buckets[bucket].optimizer
        state: dict[Any, Any] = {}
        for key, parameter in params.items():
            table = tables[key]
            name = engine.plan.tables[engine.tables[table].index].name
            state[parameter] = {
                f"{name}.{part.name}": TableState(blocks, table, part) for part in settings.states
            }
            if settings.counts_steps:
                state[parameter][f"{name}.{STEPS}"] = StepCount(blocks, table)
        group = {"params": list(params.values()), "lr": engine.learning_rates[bucket]}
        super().__init__(dict(params), state, [group])

    def step(self, closure: Any = None) -> None:
        """Apply the learning rate that was set; rows were updated in backward."""
        self._take_learning_rate()

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._take_learning_rate()

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps taken so far, for Adam and for stochastic rounding."""
        self._blocks.write_steps(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set the learning rate, `lr`."""
        if others := sorted(set(params_dict) - {"lr"}):
            raise _fixed(others)
        if "lr" in params_dict:
            self.param_groups[0]["lr"] = params_dict["lr"]
            self._take_learning_rate()

    def add_param_group(self, param_group: Any) -> None:
        """Refuse a group: the model has no further tables."""
        raise OperError(
            "add_param_group: expected the tables' own groups, got another one: give other "
            "parameters to an optimizer of their own"
        )

    def _cannot_be(self, done: str) -> OperError:
        return OperError(
            f"optimizer of {', '.join(self.params)}: its states lie in memory that all ranks "
            f"share, and cannot be {done}: save its state_dict(), and load it into another model's "
            "fused_optimizer"
        )

    def _take_learning_rate(self) -> None:
        if others := sorted(_FIXED & self.param_groups[0].keys()):
            raise _fixed(others)
        capture = self._engine.device.capture
        if capture is not None:  # a rate that is set later is taken when the step is run
            if self._engine.training_step.rates_are_used():
                capture.after(self._take_learning_rate)
                return
            capture.before(self._take_learning_rate)
        lr = finite_number(self.param_groups[0]["lr"], "the tables' lr")
        self._engine.learning_rates[self._bucket] = lr


def _fixed(settings: Sequence[str]) -> OperError:
    return OperError(
        f"{', '.join(settings)}: cannot be changed while training; only lr can: give the others to "
        "apply_optimizer_in_backward or the sharder's fused_params"
    )
