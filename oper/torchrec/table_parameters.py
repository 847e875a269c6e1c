"""Empty parameters that stand for tables: they freeze tables, and misuse of them is detected.

A script may set `requires_grad` of a table's parameter at any time, like for any other parameter.
Any other change to a parameter would leave the rows unchanged, because they lie in the ranks'
heaps: the next lookup raises an error with the table's name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from oper.base.errors import OperError
from oper.runtime.tables.optimizer_buckets import Bucket

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_WRITE_ROWS = (
    "to set rows, give load_state_dict whole tables, or set init_fn in the table's config before "
    "the model is sharded"
)


class TableParameter(nn.Parameter):
    """Empty parameter of a table. Writes to its `data` are detected, like writes to itself."""

    @property
    def data(self) -> torch.Tensor:
        """Parameter without its history: torch's own `data` does not count writes."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class TableHolder(nn.Module):
    """Module that has a table's parameter, permanently, under the name `weight`."""

    def __init__(self, table: str, weight: nn.Parameter) -> None:
        super().__init__()
        self._table = table
        self.register_parameter("weight", weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and value is not self._parameters.get(name):
            got = type(value).__name__
            raise OperError(
                f"table {self._table!r}: expected its own parameter, got another {got}, which "
                f"changes no row: {_WRITE_ROWS}; and give fully_shard "
                "ignored_params={*collection.fused_optimizer.params.values()} of all collections, "
                "each sharded by oper.shard"
            )
        super().__setattr__(name, value)


class TableParameters:
    """Parameters of a collection's tables; `trained` marks the tables that have an optimizer.

    A call checks all parameters and returns the numbers of the frozen tables.
    """

    def __init__(self, tables: Mapping[str, nn.Module], buckets: Sequence[Bucket], training: bool):
        self._tables = tables
        self._names, self._holders = list(tables), list(tables.values())
        self._weights = [holder.weight for holder in self._holders]
        self._trained = {n for bucket in buckets if bucket.trained for n in bucket.tables}
        self._training = training
        self._versions: list[int] | None = [weight._version for weight in self._weights]

    def accept_writes(self) -> None:
        """Accept all writes until the next call, because a state dict is loaded."""
        self._versions = None

    def accept_moves(self) -> None:
        """Accept parameters that torch has replaced, as it does for some types of tensors."""
        for number, holder in enumerate(self._holders):
            if holder.weight is not self._weights[number]:
                self._weights[number] = holder.weight
                if self._versions is not None:
                    self._versions[number] = holder.weight._version

    def __call__(self) -> frozenset[int]:
        versions = [weight._version for weight in self._weights]
        if self._versions is None:
            self._versions = versions
        elif self._versions != versions:
            table = next(n for n, v in enumerate(versions) if v != self._versions[n])
            self._versions = versions
            raise self._refused(table, "its parameter was written to, which changes no row")
        if list(self._tables.values()) != self._holders:
            raise OperError(
                f"tables {', '.join(self._names)}: expected the modules that sharding made, got "
                f"others or fewer, which change no row: {_WRITE_ROWS}"
            )
        frozen = []
        for number, (holder, weight) in enumerate(zip(self._holders, self._weights, strict=True)):
            parameter = holder._parameters.get("weight")
            if parameter is not weight or len(weight):
                raise self._refused(number, "its parameter was replaced, which changes no row")
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise OperError(
                    f"table {self._names[number]!r}: expected no hooks on its parameter, got one, "
                    "which never runs because gradients go to the rows directly: remove it, or "
                    "register it on the collection's output"
                )
            if not self._training or weight.requires_grad == (number in self._trained):
                continue
            if weight.requires_grad:
                raise OperError(
                    f"table {self._names[number]!r}: expected requires_grad False, as when the "
                    "model was sharded, got True, and the table has no optimizer: set "
                    "requires_grad before the model is sharded, and freeze the table afterwards"
                )
            frozen.append(number)
        return frozenset(frozen)

    def _refused(self, table: int, problem: str) -> OperError:
        return OperError(f"table {self._names[table]!r}: {problem}: {_WRITE_ROWS}")


class OptimizersOfTable(list[Any]):
    """Optimizers of one table's parameter, to which `apply_optimizer_in_backward` appends."""

    def __init__(self, table: str, optimizer: Any) -> None:
        super().__init__([optimizer])
        self._table = table

    def append(self, optimizer: Any) -> None:
        """Refuse an optimizer."""
        raise OperError(
            f"table {self._table!r}: expected its optimizer before the model is sharded, got "
            f"{type(optimizer).__name__} after: call apply_optimizer_in_backward first"
        )


def check_moves(collection: str, fn: Any, place: torch.device) -> None:
    """Raise OperError if `fn`, by which torch changes a module's tensors, changes dtype or device.

    Args:
        collection: name of the sharded collection in errors.
        place: the device of the tables.
    """
    before = torch.empty(0, device=place)
    after = fn(before)
    if after.dtype != before.dtype:
        raise OperError(
            f"{collection}: expected rows to keep the dtype of the plan, got {after.dtype}: set "
            "data_type in the tables' configs and plan for it, and convert dense submodules alone"
        )
    if after.device != before.device:
        raise OperError(
            f"{collection}: expected the tables to stay on {before.device}, got {after.device}: "
            "give oper.shard or DistributedModelParallel the device, and move dense submodules "
            "alone"
        )


def check_hooks(collection: nn.Module, tables: Mapping[str, nn.Parameter]) -> None:
    """Raise OperError if an unsharded collection has hooks, which sharding would lose."""
    name = type(collection).__name__
    if any(getattr(collection, hooks) for hooks in _HOOKS):
        raise OperError(
            f"{name} of tables {', '.join(tables)}: expected no hooks before the model is sharded, "
            "got one, which sharding would lose: register it on the sharded collection"
        )
    for table, weight in tables.items():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise OperError(
                f"table {table!r}: expected no hooks on its parameter, got one, which sharding "
                "would lose: remove it, or register it on the sharded collection's output"
            )
