"""Model that `oper.shard` returns, which may be a part of another model.

    model.part.ebc = oper.shard(model.part.ebc, plan)

TorchRec's DistributedModelParallel is meant for whole models: inside another model it prefixes the
names of a state dict with the path twice, and also those of other modules. Here a part has the
names of the unsharded model, which `load_state_dict` of the whole model expects.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer

from oper.base.errors import OperError
from oper.torchrec.fused_optimizer import TableOptimizers

_WRAPPERS = (DistributedModelParallel, DistributedDataParallel, FullyShardedDataParallel)
_WRAPPED = "_dmp_wrapped_module."  # attribute in which DistributedModelParallel keeps its model


class ShardedModel(DistributedModelParallel):
    """DistributedModelParallel whose state dicts have the unsharded model's names anywhere."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._table_optimizers = TableOptimizers(super().fused_optimizer.optimizers)
        self.register_load_state_dict_post_hook(_with_names_of_users)

    def __getattr__(self, name: str) -> Any:
        """Return a part of the wrapped model: torch follows the names of parameters by attributes,
        for example in functional_call and distributed.checkpoint.state_dict."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_dmp_wrapped_module" in self._modules:
                inside = self.module
                for parts in (inside._modules, inside._parameters, inside._buffers):
                    if name in parts:
                        return parts[name]
            raise

    @property
    def fused_optimizer(self) -> TableOptimizers:
        """Optimizers of the tables."""
        return self._table_optimizers

    def no_sync(self) -> None:
        """Refuse DistributedDataParallel's gradient accumulation, which tables do not follow."""
        raise OperError(
            "no_sync: expected oper.accumulate(model), which holds back the gradients of tables: "
            "use it in the place of no_sync; the dense part adds up gradients until zero_grad"
        )

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the state dict, or add it to `destination` with `prefix` before all names."""
        states: Any = super().state_dict(keep_vars=keep_vars)
        if destination is None and not prefix:
            return states
        result: Any = OrderedDict() if destination is None else destination
        result.update((prefix + name, value) for name, value in states.items())
        if hasattr(result, "_metadata"):
            of_modules = states._metadata.items()
            result._metadata.update(((prefix + path).rstrip("."), v) for path, v in of_modules)
        return result

    def load_state_dict(
        self,
        state_dict: Any,
        prefix: str | bool = "",
        strict: bool | None = None,
        assign: bool = False,
    ) -> Any:
        """Load a state dict; raise OperError with `assign`, because tables keep their rows.

        The second argument is TorchRec's `prefix`, or torch's `strict` if it is a bool; the third
        is then torch's `assign`.
        """
        if isinstance(prefix, bool):
            assign = assign or bool(strict)
            strict, prefix = prefix, ""
        if assign:
            raise OperError(
                "load_state_dict: expected assign=False, got True, and rows stay where the plan "
                "has them: leave assign out"
            )
        return super().load_state_dict(state_dict, prefix, strict is not False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        # Torch calls this for a part of a model, and then loads the parts inside by their own
        # names.
        inside = prefix + self._path_inside
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[inside + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *given)

    @property
    def _path_inside(self) -> str:
        data_parallel = isinstance(self._dmp_wrapped_module, DistributedDataParallel)
        return _WRAPPED + "module." * data_parallel


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by their paths in the unsharded model, without wrappers."""
    for path, module, wraps in _modules(model):
        if not wraps:
            yield path, module


def fused_optimizer_of(model: Any) -> CombinedOptimizer:
    """Return the optimizers of all tables of a model, which may have sharded parts.

    Raises:
        OperError: DistributedModelParallel wraps a part of the model.
    """
    if isinstance(model, FusedOptimizerModule):
        return model.fused_optimizer
    fused = []
    for path, module, wraps in _modules(model):
        if type(module) is DistributedModelParallel:
            raise OperError(
                f"{path!r}: expected oper.shard for a part of a model, got "
                "DistributedModelParallel, whose state dict repeats the path in all names: shard "
                "the part with oper.shard, or the whole model with DistributedModelParallel"
            )
        if isinstance(module, FusedOptimizerModule) and not wraps:
            fused.append((path, module.fused_optimizer))
    return CombinedOptimizer(fused)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each module with its path in the unsharded model, and whether it wraps another one."""
    known: dict[str, tuple[str, bool]] = {}
    for path, module in model.named_modules():
        around, _, name = path.rpartition(".")
        outer, wrapped = known[around] if path else ("", True)
        unsharded = outer if wrapped else f"{outer}.{name}".removeprefix(".")
        known[path] = (unsharded, isinstance(module, _WRAPPERS))
        yield unsharded, module, known[path][1]


def _with_names_of_users(module: nn.Module, keys: Any) -> None:
    """Rename the keys that torch reports as missing or unexpected to the names of the unsharded
    model."""
    assert isinstance(module, ShardedModel)
    for names in keys:
        names[:] = [name.replace(module._path_inside, "", 1) for name in names]
