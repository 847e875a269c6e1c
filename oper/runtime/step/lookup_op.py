"""torch.ops.oper.embedding_lookup: the lookup of a whole module as one operator with a gradient.

Its tensors are a batch's; `engine` is the number of the Embedding whose heap is read. The heap is
no argument: other ranks write to it between two calls, which no graph can see. The backward sends
the gradients home and takes the optimizer's step, as TorchRec's fused optimizers do; the gradient
of `anchor`, an empty parameter, is there so that autograd calls it.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from oper.base.errors import OperError
from oper.runtime.step.batch import PreparedBatch

_engines: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("oper", "FRAGMENT")
_BATCH = (
    "Tensor addresses, Tensor segment_offset, Tensor? offsets, Tensor? weights, Tensor features,"
    " Tensor[] runs, SymInt out_elements"
)


_library.define(f"embedding_lookup(Tensor anchor, {_BATCH}, int engine) -> Tensor")


_library.define(
    f"embedding_backward(Tensor grad, Tensor anchor, {_BATCH}, bool weights_too, int engine)"
    " -> (Tensor, Tensor)"
)


def register(engine: Any) -> int:
    """A number for an engine, which no other ever gets: graphs may outlive it."""
    number = next(_numbers)
    _engines[number] = engine
    return number


def engines() -> list[Any]:
    """Those of this process that are still in use."""
    return list(_engines.values())


class _Lookup(torch.autograd.Function):
    """The same without a graph to build: the operator's own autograd, written in Python for any
    operator, takes a millisecond a step, as much as a small batch's whole step."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        weights: torch.Tensor | None,
        batch: PreparedBatch,
        engine: Any,
    ) -> torch.Tensor:
        ctx.batch, ctx.engine = batch, engine
        return engine.read(batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight_grad = ctx.engine.train(ctx.batch, grad.contiguous(), ctx.needs_input_grad[1])
        return None, weight_grad, None, None


def _engine(number: int) -> Any:
    engine = _engines.get(number)
    if engine is None:
        raise OperError("the tables that this lookup was of are gone")
    return engine


def lookup(anchor: torch.Tensor, batch: PreparedBatch, engine: int) -> torch.Tensor:
    """The output of a batch, flat."""
    if not torch.compiler.is_compiling():
        return _Lookup.apply(anchor, batch.weights, batch, _engine(engine))
    return torch.ops.oper.embedding_lookup(
        anchor,
        batch.addresses,
        batch.segment_offset,
        batch.offsets,
        batch.weights,
        batch.features,
        # Graphs hold tensors: one that is still being sorted is sorted again in backward.
        list(batch.sort) if isinstance(batch.sort, tuple) else [],
        batch.out_elements,
        engine,
    )


def _batch(
    addresses: torch.Tensor,
    segment_offset: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: torch.Tensor,
    runs: Sequence[torch.Tensor],
    out_elements: int,
) -> PreparedBatch:
    order = (runs[0], runs[1], runs[2], runs[3]) if runs else None
    return PreparedBatch(addresses, segment_offset, offsets, weights, features, out_elements, order)


def _forward(anchor: torch.Tensor, *rest: Any) -> torch.Tensor:
    *tensors, engine = rest
    return _engine(engine).read(_batch(*tensors))


def _backward(grad: torch.Tensor, anchor: torch.Tensor, *rest: Any) -> Any:
    *tensors, weights_too, engine = rest
    weight_grad = _engine(engine).train(_batch(*tensors), grad.contiguous(), weights_too)
    if weight_grad is None:
        weight_grad = grad.new_empty(0)
    return torch.zeros_like(anchor), weight_grad


def _forward_shape(anchor: torch.Tensor, *rest: Any) -> torch.Tensor:
    return anchor.new_empty([rest[-2]], dtype=torch.float32)


def _backward_shape(grad: torch.Tensor, anchor: torch.Tensor, *rest: Any) -> Any:
    weights, weights_too = rest[3], rest[-2]
    size = weights.shape if weights_too else (0,)
    return torch.empty_like(anchor), grad.new_empty(size, dtype=torch.float32)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    anchor, addresses, segment_offset, offsets, weights, features, runs, elements, engine = inputs
    ctx.optional = (offsets is not None, weights is not None)
    present = [t for t in (offsets, weights) if t is not None]
    ctx.save_for_backward(anchor, addresses, segment_offset, features, *present, *runs)
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


_library.impl("embedding_backward", _backward, "CPU")


torch.library.register_fake("oper::embedding_lookup", _forward_shape, lib=_library)


torch.library.register_fake("oper::embedding_backward", _backward_shape, lib=_library)


torch.library.register_autograd(
    "oper::embedding_lookup", _gradient, setup_context=_setup, lib=_library
)
