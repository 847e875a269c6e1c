"""Training step of a model as CUDA graphs, for batches of one shape.

    step = oper.graph_step(model, train)      # train(batch) goes forward, backward, and updates
    for batch in batches:
        loss = step(batch)

The first steps run eagerly. Then the step is captured (runtime/step_graph.py), and from then on
runs as one graph, or as several with waits for other ranks in between.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oper.base.errors import OperError, check_type, first_line
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import capture_on
from oper.runtime.step_graph import StepGraph, device_of, memory_of, same_memory
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.static_inputs import Inputs, StaticInputs, cloned, mapped

WARM_UP = 3  # eager steps before one is captured
_WARM_UP_IN_PARALLEL = 11  # because DistributedDataParallel times its first ten steps
_NEVER = 2**31 - 1  # steps between two that it times, which no graph may contain

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_in_line: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules with our hook


class GraphedStep(Generic[Result]):
    """Step of a model; made by `graph_step`."""

    def __init__(self, model: nn.Module, step: Callable[..., Result]) -> None:
        self._model, self._step = model, step
        self._collections = list(sharded_collections(model).values())
        self._engines: list[EmbeddingEngine] = [
            collection.engine for collection in self._collections
        ]
        self._device = device_of(self._engines)
        for engine in self._engines:
            engine.training_step.to_capture()
        self._warm_up = WARM_UP
        if self._engines[0].training:
            self._reduce_in_line()
        self._static: StaticInputs | None = None
        self._graph: StepGraph | None = None
        # Inputs of the last eager step, and the number of steps of that shape until then.
        self._last: Inputs | None = None
        self._alike = 0
        self._memory: list[object] = []  # of the tables after that step
        self._mode: tuple[Any, ...] = ()  # of those steps
        self._modules = list(model.modules())
        # Unpooled lookups need equally many values of each key.
        self._counts_too = not all(engine.features.pooled for engine in self._engines)
        self._dense = [parameter for parameter in model.parameters() if parameter.numel()]
        # Parameters whose gradient the step releases before it reads it.
        self._let_go: set[nn.Parameter] = set()
        self._there: list[tuple[bool, int, int]] = []  # before the captured step
        self._grads: list[tuple[nn.Parameter, torch.Tensor]] = []  # after the captured step
        # Gradients that the step reads before it releases them, and those that it then makes, which
        # are copied to the place that the next step reads.
        self._looked_at: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._elsewhere = 0  # later steps whose dense part or gradients lay elsewhere
        self._warned = False

    @property
    def captured(self) -> bool:
        """True if steps of the captured shape now run as graphs."""
        return self._graph is not None and not self._graph.out_of_date

    def release(self) -> None:
        """Release the graph and its memory; the next steps run eagerly again."""
        self._graph = self._static = self._last = None
        self._there, self._grads, self._looked_at = [], [], ([], [])
        self._elsewhere = 0

    def __call__(self, *inputs: Any) -> Result:
        """Run one step. Inputs are tensors and KeyedJaggedTensors on the model's device, and lists,
        tuples, dicts and dataclasses of them. With inputs of another shape than the captured one
        the step runs eagerly.

        Raise the step's errors, and OperError if it cannot be captured.
        """
        step_inputs = Inputs(inputs)
        step_inputs.check_on(self._device.torch_device)
        if self._graph is not None and (self._graph.out_of_date or self._elsewhere > self._warm_up):
            self.release()
        if self._graph is None:
            if not self._is_warm(step_inputs):
                return self._as_it_is(step_inputs)
            self._capture(step_inputs)
        assert self._static is not None
        assert self._graph is not None
        if not self._fits(step_inputs):
            return self._as_it_is(step_inputs)
        static = self._static
        result: Result = self._graph.run(lambda: static.fill(step_inputs), _cloned)
        if self._looked_at[0]:
            torch._foreach_copy_(*self._looked_at, non_blocking=True)
        for parameter, grad in self._grads:
            parameter.grad = grad
        return result

    def _fits(self, inputs: Inputs) -> bool:
        """Return whether a step equals the captured one."""
        assert self._static is not None
        if self._mode != self._mode_now() or self._counted() or not self._static.fit(inputs):
            return False
        same = self._there == self._there_now()
        self._elsewhere = 0 if same else self._elsewhere + 1
        return same

    def _there_now(self) -> list[tuple[bool, int, int]]:
        """Return for each parameter of the dense part whether it is trained, its address, and the
        address of its gradient, which the step may add to or use; 0 if the step does neither."""
        return [
            (
                parameter.requires_grad,
                parameter.data_ptr(),
                0
                if parameter.grad is None or parameter in self._let_go
                else parameter.grad.data_ptr(),
            )
            for parameter in self._dense
        ]

    def _is_warm(self, inputs: Inputs) -> bool:
        """Return whether the previous steps had this shape, and can be captured."""
        mode = self._mode_now()
        if (
            self._last is None
            or not same_memory(memory_of(self._engines), self._memory)
            or any(engine.rows_are_moving for engine in self._engines)
            or self._counted()
            or mode != self._mode
            or not inputs.like(self._last, self._counts_too)
        ):
            self._alike = 0
        self._last, self._alike, self._mode = inputs, self._alike + 1, mode
        return self._alike > self._warm_up

    def _mode_now(self) -> tuple[Any, ...]:
        """Return the settings, other than inputs and memory, that a captured step depends on."""
        kind = self._device.torch_device.type
        return (
            *[module.training for module in self._modules],
            *[engine.training_step.frozen_tables() for engine in self._engines],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )

    def _as_it_is(self, inputs: Inputs) -> Result:
        before = [(parameter, parameter.grad) for parameter in self._dense]
        # True in the last step before the capture, if its shape is the same.
        looks = self._graph is None and self._alike == self._warm_up
        used = _Used(grad for _, grad in before) if looks else contextlib.nullcontext()
        # On a side stream, because torch accumulates a parameter's gradient on the stream of its
        # first use.
        with self._device.beside(), used:
            result = self._step(*inputs.given)
        self._memory = memory_of(self._engines)
        if isinstance(used, _Used):
            self._let_go = {
                parameter
                for parameter, grad in before
                if grad is not None and parameter.grad is not grad and not used.one(grad)
            }
        mapped(result, lambda leaf: leaf)  # raises its error before the step is captured
        return result

    def _capture(self, inputs: Inputs) -> None:
        inputs.check_on(self._device.torch_device)
        static, self._there = StaticInputs(inputs), self._there_now()
        before = [parameter.grad for parameter in self._dense]
        try:
            self._graph = StepGraph(self._engines, lambda: self._step(*static.arguments))
            self._keep_grads(before)
        except OperError:
            raise
        except RuntimeError as error:
            raise OperError(
                f"the step cannot be captured: {first_line(error)}. Leave out of it what looks at "
                "values on the host, or copies from there, as .item(), print and torch.tensor(…)"
            ) from error
        finally:
            for parameter, grad in zip(self._dense, before, strict=True):
                parameter.grad = grad  # because nothing was run
        self._static, self._last = static, None

    def _keep_grads(self, before: list[torch.Tensor | None]) -> None:
        """Record the gradients that the captured step leaves, in place of the gradients `before`
        it."""
        self._grads, self._looked_at = [], ([], [])
        for parameter, old in zip(self._dense, before, strict=True):
            made = parameter.grad
            if made is None:
                continue
            same = old is not None and old.data_ptr() == made.data_ptr()
            if old is None or same or parameter in self._let_go:
                self._grads.append((parameter, made))
                continue
            self._grads.append((parameter, old))
            self._looked_at[0].append(old)
            self._looked_at[1].append(made)

    def _counted(self) -> bool:
        """Return whether batches are counted on the host, so that steps run eagerly."""
        hooks = (
            hook
            for collection in self._collections
            for hook in collection._forward_pre_hooks.values()
        )
        if not any(getattr(hook, "counts_batches", False) for hook in hooks):
            return False
        if not self._warned:
            _log.warning(
                "oper.graph_step: batches are counted, by oper.record or a monitor, on the host: "
                "until that ends, steps are run as they are"
            )
            self._warned = True
        return True

    def _reduce_in_line(self) -> None:
        """Have the gradients of the dense part summed in line with the backward pass: concurrent
        work would have to end before ranks wait for each other, at the end of a graph."""
        for module in self._model.modules():
            if not isinstance(module, DistributedDataParallel):
                continue
            self._warm_up = _WARM_UP_IN_PARALLEL
            if module in _in_line:
                continue
            try:
                module.register_comm_hook(module.process_group, _sum_in_line)
            except RuntimeError as error:
                raise OperError(
                    "the model's DistributedDataParallel has a hook for its AllReduce already: a "
                    f"step is captured with one of its own ({first_line(error)})"
                ) from error
            module._set_ddp_runtime_logging_sample_rate(_NEVER)
            _in_line.add(module)


def graph_step(model: nn.Module, step: Callable[..., Result]) -> GraphedStep[Result]:
    """Return a step of a model that runs as CUDA graphs from the fourth call with one shape of
    inputs on, so that the host's time no longer grows with the number of operators.

    Args:
        model: sharded by OPER, on a CUDA device, for training or inference.
        step: the work of a step, from forward to the update of the dense part, in a form that torch
            can capture: the host may not read values, and its work other than launches on the
            device is done once, at the capture. Inputs and results are tensors, KeyedJaggedTensors,
            and lists, tuples, dicts and dataclasses of them.

    Returns:
        A callable in the place of `step`; all ranks call theirs together.

    Raises:
        OperError: the model's steps cannot be captured: on the CPU, over several nodes, with
            checks of gradients, or with a hook of DistributedDataParallel's AllReduce.
    """
    check_type("graph_step", "model", model, nn.Module)
    check_type("graph_step", "step", step, Callable)  # type: ignore[arg-type]
    return GraphedStep(model, step)


class _Used(TorchDispatchMode):
    """Recorder of the tensors, of those given, that operators use inside the context."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        super().__init__()
        self._storages = {_storage(tensor) for tensor in tensors if tensor is not None}
        self._used: set[int] = set()

    def one(self, tensor: torch.Tensor) -> bool:
        """Return whether this tensor was used."""
        return _storage(tensor) in self._used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        storages = {_storage(each) for each in leaves if isinstance(each, torch.Tensor)}
        self._used |= storages & self._storages
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sum_in_line(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket of gradients over the ranks, as DistributedDataParallel does; the
    rest of the backward pass comes after it."""
    gradients = bucket.buffer()
    gradients.mul_(1 / group.size())
    capture = capture_on(gradients.device)
    if capture is None:
        dist.all_reduce(gradients, group=group)
    else:  # never in a graph, because other ranks may run their steps eagerly
        capture.here(lambda: dist.all_reduce(gradients, group=group))
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(gradients)
    return done


def _cloned(result: Any) -> Any:
    return mapped(result, cloned)
