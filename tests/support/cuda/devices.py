"""Where the tests of device kernels run: in the emulator, or on a CUDA device."""

from typing import Any, TypeVar

import torch

from oper.base import native
from tests.support.cuda.emulator import Emulator

Maybe = TypeVar("Maybe", torch.Tensor, torch.Tensor | None)


class _Operators:
    """The operators on a device's tensors."""

    stream = 0

    def start(self, operator: str, *arguments: Any, order: int = 0, **named: Any) -> Any:
        """Call an operator with all of its arguments, the stream among them, with threads in some
        order."""
        raise NotImplementedError

    def run(
        self,
        operator: str,
        *arguments: Any,
        order: int = 0,
        report: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `torch.ops.oper` has under this name, in the host's memory."""
        given = (*arguments, self.stream, report)
        found: torch.Tensor = self.start(operator, *given, order=order)
        return found.cpu()


class Emulated(_Operators):
    """Host memory stands for the device's."""

    orders = (0, 1, 2)  # in which threads go on
    many = 40_000  # accesses of a large batch

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def put(self, tensor: Maybe) -> Maybe:
        """The tensor in memory of its own, which ends where it does: AddressSanitizer then sees
        what is read beyond it (test_sanitizer.py)."""
        return None if tensor is None else tensor.clone()

    def start(self, operator: str, *arguments: Any, order: int = 0, **named: Any) -> Any:
        self._emulator.order(order)
        return getattr(torch.ops.oper_emulated, operator)(*arguments, **named)


class Cuda(_Operators):
    """The first device; its threads go on as they like."""

    orders = (0,)
    many = 4_000_000

    def put(self, tensor: Maybe) -> Maybe:
        return None if tensor is None else tensor.cuda()

    def start(self, operator: str, *arguments: Any, order: int = 0, **named: Any) -> Any:
        return getattr(native.device_ops(), operator)(*arguments, **named)

    @property
    def stream(self) -> int:  # type: ignore[override]
        return torch.cuda.current_stream().cuda_stream


Device = Emulated | Cuda
