"""torch.ops.oper.embedding_lookup: the lookup of a whole module as one operator with a gradient.

The way of a training step through this module:

    EmbeddingEngine.lookup(batch)                       engine.py
      LookupOperator.lookup(batch)
        TrainingStep.forward(batch)                     training_step.py
          FetchPath.read(batch)                         fetch_paths/fetch_path.py
    loss.backward()                                     autograd calls this module
      TrainingStep.backward(batch, grad, …)
        Gradients.step(batch, grad)                     apply_gradients.py

In eager mode a torch.autograd.Function holds the TrainingStep. A graph of torch.compile can only
call an operator, whose arguments are tensors and numbers by its schema. So a step has a number
there, and the operator finds it in a registry, `_steps`. The registry does not keep a step: graphs
may outlive the engine.

The heap is no argument of the operator: other ranks write to it between two calls, which no graph
can see. The backward sends the gradients to the rows' owners and takes the optimizer's step,
as TorchRec's fused optimizers do; the gradient of `anchor`, an empty parameter, is there so that
autograd calls it.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Device
from oper.runtime.memory.prepared_batch import PreparedBatch, SortedRows
from oper.runtime.step.training_step import TrainingStep

_steps: "weakref.WeakValueDictionary[int, TrainingStep]" = weakref.WeakValueDictionary()
_numbers = itertools.count()  # no number is used twice
_library = torch.library.Library("oper", "FRAGMENT")
_BATCH = (
    "Tensor addresses, Tensor segment_offset, Tensor? offsets, Tensor? weights, Tensor features,"
    " Tensor[] rows, SymInt out_elements"
)


_library.define(f"embedding_lookup(Tensor anchor, {_BATCH}, int engine) -> Tensor")


_library.define(
    f"embedding_backward(Tensor grad, Tensor anchor, {_BATCH}, bool weights_too, int engine)"
    " -> (Tensor, Tensor)"
)


class LookupOperator:
    """The lookup of one engine, `trained` or not. `number` is the operator's argument `engine`."""

    def __init__(self, step: TrainingStep, device: Device, trained: bool) -> None:
        self._step, self._device = step, device
        anchor: torch.Tensor = torch.empty(0, device=device.torch_device)
        self.anchor = torch.nn.Parameter(anchor, requires_grad=trained)
        self.number = next(_numbers)
        _steps[self.number] = step

    def lookup(self, batch: PreparedBatch) -> torch.Tensor:
        """Return the output of a batch, flat float32 [out_elements]; its backward is a step."""
        if not torch.compiler.is_compiling():
            anchor: torch.Tensor = self.anchor
            if self._device.capture is not None:
                # Autograd comes to a parameter on the stream of its first use, which may not be the
                # captured one.
                anchor = anchor.detach().requires_grad_(anchor.requires_grad)
            return _Lookup.apply(anchor, batch.given_weights, batch, self._step)
        return torch.ops.oper.embedding_lookup(
            self.anchor,
            batch.addresses,
            batch.segment_offset,
            batch.offsets,
            batch.weights,
            batch.features,
            # Graphs hold tensors: one that is still being sorted is sorted again in backward.
            batch.sort.tensors() if isinstance(batch.sort, SortedRows) else [],
            batch.out_elements,
            self.number,
        )


class _Lookup(torch.autograd.Function):
    """The lookup in eager mode. The operator would do there too, but its autograd, which torch
    writes in Python for any operator, takes a millisecond a step: as much as a small batch's whole
    step."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        weights: torch.Tensor | None,
        batch: PreparedBatch,
        step: TrainingStep,
    ) -> torch.Tensor:
        ctx.batch, ctx.step, ctx.frozen = batch, step, step.frozen_tables()
        # Backward reads the user's weights: if they were written to by then, torch raises.
        weighs = weights is not None and not weights.is_inference()
        ctx.save_for_backward(anchor, *([weights] if weighs else []))
        return step.forward(batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Read for torch's error if the graph was freed, because a second backward of one forward
        # would update its rows twice; or if weights were written to since.
        _ = ctx.saved_tensors
        contiguous, weights_too = grad.contiguous(), ctx.needs_input_grad[1]
        weight_grad = ctx.step.backward(ctx.batch, contiguous, weights_too, ctx.frozen)
        return None, weight_grad, None, None


# The operator, for graphs.


def _step(number: int) -> TrainingStep:
    step = _steps.get(number)
    if step is None:
        raise OperError("the tables that this lookup was of are gone")
    return step


def _batch(
    step: TrainingStep,
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: torch.Tensor,
    rows: Sequence[torch.Tensor],
    out_elements: int,
) -> PreparedBatch:
    step.check_graphs()
    sort = step.rows_of(rows, offsets, weights)
    return PreparedBatch(addresses, segment_offset, offsets, weights, features, out_elements, sort)


def _forward(anchor: torch.Tensor, *rest: Any) -> torch.Tensor:
    *batch, number = rest
    step = _step(number)
    return step.forward(_batch(step, *batch))


def _backward(grad: torch.Tensor, anchor: torch.Tensor, *rest: Any) -> Any:
    *batch, weights_too, number = rest
    step = _step(number)
    weight_grad = step.backward(_batch(step, *batch), grad.contiguous(), weights_too)
    if weight_grad is None:
        weight_grad = grad.new_empty(0)
    return torch.zeros_like(anchor), weight_grad


def _forward_shape(anchor: torch.Tensor, addresses: torch.Tensor, *rest: Any) -> torch.Tensor:
    return addresses.new_empty([rest[-2]], dtype=torch.float32)


def _backward_shape(grad: torch.Tensor, anchor: torch.Tensor, *rest: Any) -> Any:
    weights, weights_too = rest[3], rest[-2]
    size = weights.shape if weights_too else (0,)
    return torch.empty_like(anchor), grad.new_empty(size, dtype=torch.float32)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    anchor, addresses, segment_offset, offsets, weights, features, rows, elements, engine = inputs
    ctx.optional = (offsets is not None, weights is not None)
    present = [t for t in (offsets, weights) if t is not None]
    ctx.save_for_backward(anchor, addresses, segment_offset, features, *present, *rows)
    ctx.elements, ctx.engine = elements, engine


def _gradient(ctx: Any, grad: torch.Tensor) -> Any:
    anchor, addresses, segment_offset, features, *rest = ctx.saved_tensors
    has_offsets, has_weights = ctx.optional
    offsets = rest.pop(0) if has_offsets else None
    weights = rest.pop(0) if has_weights else None
    weights_too = ctx.needs_input_grad[4]
    anchor_grad, weight_grad = torch.ops.oper.embedding_backward(
        grad, anchor, addresses, segment_offset, offsets, weights, features, rest, ctx.elements,
        weights_too, ctx.engine,
    )  # fmt: skip
    weights_grad = weight_grad if weights_too else None
    return anchor_grad, None, None, None, weights_grad, None, [None] * len(rest), None, None


_library.impl("embedding_lookup", _forward, "CPU")
_library.impl("embedding_lookup", _forward, "CUDA")


_library.impl("embedding_backward", _backward, "CPU")
_library.impl("embedding_backward", _backward, "CUDA")


torch.library.register_fake("oper::embedding_lookup", _forward_shape, lib=_library)


torch.library.register_fake("oper::embedding_backward", _backward_shape, lib=_library)


torch.library.register_autograd(
    "oper::embedding_lookup", _gradient, setup_context=_setup, lib=_library
)
