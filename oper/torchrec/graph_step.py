"""A training step of a model as CUDA graphs, for batches of one shape.

    step = oper.graph_step(model, train)      # train(batch) goes forward, backward, and updates
    for batch in batches:
        loss = step(batch)

The first steps are run as they are. Then the step is captured (runtime/step_graph.py), and from
there on run as a graph of all of it, or as some with the waits for other ranks between.
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

WARM_UP = 3  # steps that are run as they are before one is captured
_WARM_UP_IN_PARALLEL = 11  # as DistributedDataParallel takes times of its first ten steps
_NEVER = 2**31 - 1  # steps from one to the next that it takes times of, which no graph can have

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_in_line: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # that have our hook


class GraphedStep(Generic[Result]):
    """A step of a model; made by `graph_step`."""

    def __init__(self, model: nn.Module, step: Callable[..., Result]) -> None:
        self._model, self._step = model, step
        self._collections = list(sharded_collections(model).values())
        self._engines: list[EmbeddingEngine] = [each.engine for each in self._collections]
        self._device = device_of(self._engines)
        for engine in self._engines:
            engine.training_step.to_capture()
        self._warm_up = WARM_UP
        if self._engines[0].training:
            self._reduce_in_line()
        self._static: StaticInputs | None = None
        self._graph: StepGraph | None = None
        # The inputs of the last step that was run as it is, and how many had that shape till then.
        self._last: Inputs | None = None
        self._alike = 0
        self._memory: list[object] = []  # that the tables had when it had been run
        self._mode: tuple[Any, ...] = ()  # that they were run in
        self._modules = list(model.modules())
        # Lookups that are not pooled need as many values of each key.
        self._counts_too = not all(engine.features.pooled for engine in self._engines)
        self._dense = [parameter for parameter in model.parameters() if parameter.numel()]
        # Those whose gradient the step lets go before it looks at it.
        self._let_go: set[nn.Parameter] = set()
        self._there: list[tuple[bool, int, int]] = []  # before the step that was captured
        self._grads: list[tuple[nn.Parameter, torch.Tensor]] = []  # as it left them
        # Gradients that the step looks at before it lets them go, and those that it then makes,
        # which come to where the next one looks.
        self._looked_at: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._elsewhere = 0  # steps since then whose dense part, or gradients, lay elsewhere
        self._warned = False

    @property
    def captured(self) -> bool:
        """Whether steps of the shape that was captured are run as graphs now."""
        return self._graph is not None and not self._graph.out_of_date

    def release(self) -> None:
        """Let the graph go, with its memory; the next steps are run as they are again."""
        self._graph = self._static = self._last = None
        self._there, self._grads, self._looked_at = [], [], ([], [])
        self._elsewhere = 0

    def __call__(self, *inputs: Any) -> Result:
        """One step. Inputs are tensors and KeyedJaggedTensors on the model's device, and lists,
        tuples, dicts and dataclasses of them. Of another shape than what was captured the step is
        run as it is.

        Raises what the step raises; OperError if it cannot be captured.
        """
        given = Inputs(inputs)
        given.check_on(self._device.torch_device)
        if self._graph is not None and (self._graph.out_of_date or self._elsewhere > self._warm_up):
            self.release()
        if self._graph is None:
            if not self._is_warm(given):
                return self._as_it_is(given)
            self._capture(given)
        assert self._static is not None
        assert self._graph is not None
        if not self._fits(given):
            return self._as_it_is(given)
        static = self._static
        result: Result = self._graph.run(lambda: static.fill(given), _cloned)
        if self._looked_at[0]:
            torch._foreach_copy_(*self._looked_at, non_blocking=True)
        for parameter, grad in self._grads:
            parameter.grad = grad
        return result

    def _fits(self, inputs: Inputs) -> bool:
        """Whether a step is the one that was captured."""
        assert self._static is not None
        if self._mode != self._mode_now() or self._counted() or not self._static.fit(inputs):
            return False
        same = self._there == self._there_now()
        self._elsewhere = 0 if same else self._elsewhere + 1
        return same

    def _there_now(self) -> list[tuple[bool, int, int]]:
        """Of each parameter of the dense part whether it is trained, where it lies, and where its
        gradient does, which the step may add to or use; 0, where the step does neither."""
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
        """Whether the steps before had this shape, and can be captured."""
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
        """What else makes a step another one."""
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
        # The last one before the step is captured, if it is of that shape.
        looks = self._graph is None and self._alike == self._warm_up
        used = _Used(grad for _, grad in before) if looks else contextlib.nullcontext()
        # Beside, as torch lets a parameter's gradient be added up on the stream of its first use.
        with self._device.beside(), used:
            result = self._step(*inputs.given)
        self._memory = memory_of(self._engines)
        if isinstance(used, _Used):
            self._let_go = {
                parameter
                for parameter, grad in before
                if grad is not None and parameter.grad is not grad and not used.one(grad)
            }
        mapped(result, lambda leaf: leaf)  # for its error before the step is captured
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
                parameter.grad = grad  # as nothing was run
        self._static, self._last = static, None

    def _keep_grads(self, before: list[torch.Tensor | None]) -> None:
        """As the step that was captured leaves them, where there were those before it."""
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
        """Whether batches are counted on the host, so that steps are run as they are."""
        hooks = (hook for each in self._collections for hook in each._forward_pre_hooks.values())
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
        """Have the gradients of the dense part summed where the backward comes to them: what goes
        on beside it would have to end before ranks wait for each other, where a graph ends."""
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
    """A step of a model, that is run as CUDA graphs from the fourth call with one shape of inputs
    on: what the host takes for it no longer grows with its operators.

    Args:
        model: sharded by OPER, on a CUDA device, for training or inference.
        step: what a step does, from forward to the update of the dense part, as torch's graphs can
            have it: the host may not look at values, and what it does beside starting work on the
            device is done once, when the step is captured. Its inputs, and what it returns, are
            tensors, KeyedJaggedTensors, and lists, tuples, dicts and dataclasses of them.

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
    """Which of some tensors operators are given, that are called inside."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        super().__init__()
        self._storages = {_storage(tensor) for tensor in tensors if tensor is not None}
        self._used: set[int] = set()

    def one(self, tensor: torch.Tensor) -> bool:
        """Whether this one was used."""
        return _storage(tensor) in self._used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        storages = {_storage(each) for each in given if isinstance(each, torch.Tensor)}
        self._used |= storages & self._storages
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sum_in_line(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket of gradients over the ranks, as DistributedDataParallel takes it; what
    the backward starts next comes after it."""
    gradients = bucket.buffer()
    gradients.mul_(1 / group.size())
    capture = capture_on(gradients.device)
    if capture is None:
        dist.all_reduce(gradients, group=group)
    else:  # never in a graph, as other ranks may run their steps as they are
        capture.here(lambda: dist.all_reduce(gradients, group=group))
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(gradients)
    return done


def _cloned(result: Any) -> Any:
    return mapped(result, cloned)
