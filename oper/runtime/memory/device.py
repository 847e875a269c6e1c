"""The device of an engine: the memory of its rows, and the kernels that read them there."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from oper.base import native
from oper.base.errors import OperError, first_line
from oper.base.free_memory import FreeMemory, free_memory, machine_memory_bytes
from oper.runtime.comm.shared_segment import DeviceSegment, Segment
from oper.runtime.memory.device_support import (
    LibraryFacts,
    check_library,
    said_visible,
    why_no_device,
)
from oper.runtime.memory.step_capture import Piece, StepCapture

Result = TypeVar("Result")

# The step that is captured on each device: torch has one capture of a stream for all its users.
_captures: dict[torch.device, StepCapture] = {}


class OnTheWay:
    """A tensor of a device on its way to the host, alongside the host's other work."""

    def __init__(self, tensor: torch.Tensor, event: Any = None) -> None:
        self._tensor, self._event = tensor, event

    def there(self) -> bool:
        """Say whether the tensor has arrived, so that `get` would not wait."""
        return self._event is None or bool(self._event.query())

    def get(self) -> torch.Tensor:
        """Return the tensor in the host's memory, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Cpu:
    """The processor and its memory."""

    kind = architecture = name = "cpu"
    torch_device = torch.device("cpu")
    stream = 0
    capture: StepCapture | None = None

    def ops(self) -> Any:
        """Return the operators on this device's tensors."""
        return native.ops()

    def segment(self, bytes: int, used_bytes: int) -> Segment:
        """Return new memory for a heap, to be shared with the node's other ranks; zero. All but
        `used_bytes` of it is only address space for now."""
        return Segment.create(bytes, bytes, "heap", used_bytes)

    def check_no_capture(self) -> None:
        """Do nothing: there are no graphs here."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: work here is done when it was started."""

    def bring(self, tensor: torch.Tensor) -> OnTheWay:
        """Return a copy of the tensor as it is now."""
        return OnTheWay(tensor.clone())

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def memory_bytes(self, ranks: int) -> int:
        """Return a rank's share of the machine's memory, if `ranks` share it."""
        return machine_memory_bytes() // ranks

    def free_memory(self) -> list[FreeMemory]:
        """Return the memory that is left under each limit of this rank's heap."""
        return free_memory()

    def new(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, in memory that is kept from step to step."""
        tensor: torch.Tensor = native.ops().reused_tensor(elements, dtype)
        return tensor

    def done(self, seconds: float) -> bool:
        """Return True: work here is done when it was started."""
        return True

    def point(self) -> None:
        """Do nothing: there are no streams here."""

    def after(self, points: Iterable[None]) -> None:
        """Do nothing: work here is done when it was started."""

    def synchronize(self) -> None:
        """Do nothing: work here is done when it was started."""


def capture_on(device: torch.device) -> StepCapture | None:
    """Return the step that is captured on a device now, None while none is."""
    return _captures.get(device)


@contextlib.contextmanager
def _gradients_are_added_up_here() -> Iterator[None]:
    """Add up, inside, the gradients of parameters that were first used on the default stream, such
    as by DistributedDataParallel when it was made, on the stream that is captured."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is None:
        yield
        return
    override(True)
    try:
        yield
    finally:
        override(False)


@contextlib.contextmanager
def _nothing_is_freed() -> Iterator[None]:
    """Suspend garbage collection inside, and keep shared memory mapped after its last tensor dies:
    unmapping waits for the device, which would end a capture."""
    collects = gc.isenabled()
    gc.disable()
    native.ops().hold_segments(True)
    try:
        yield
    finally:
        native.ops().hold_segments(False)
        if collects:
            gc.enable()


class GraphPiece:
    """A CUDA graph of a part of a step; all graphs of a step take their memory from one pool. A
    step's backward is captured in a thread of autograd's, so pieces may begin in one thread and end
    in another."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        """Capture the work that is started on this thread's stream from now on."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> bool:
        """Stop capturing. Return whether anything was captured."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self._graph.capture_end()
        # Torch tells of an empty graph only by a warning. Replaying one would do no harm.
        return not any("graph is empty" in str(warning.message).lower() for warning in warned)

    def replay(self) -> None:
        """Start the graph on this thread's stream."""
        self._graph.replay()


class Cuda:
    """One CUDA device. Work is started on torch's current stream; nothing waits for it."""

    kind = "cuda"
    _beside: Any = None  # the stream on which steps are captured

    def __init__(self, torch_device: torch.device | str = "cuda") -> None:
        device = torch.device(torch_device)
        if device.type != "cuda":
            raise OperError(f"device: expected a CUDA device such as cuda:0, got {device}")
        if not torch.cuda.is_available():
            raise OperError(f"device {device}: there is no CUDA device here: {why_no_device()}")
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise OperError(
                f"device {device}: there are {torch.cuda.device_count()} CUDA devices here, "
                f"numbered from 0{said_visible()}"
            )
        self.torch_device = torch.device("cuda", number)
        properties = torch.cuda.get_device_properties(self.torch_device)
        facts = LibraryFacts.of(*self.ops().describe_device_library())
        check_library(
            facts, f"{self.torch_device}, {properties.name},", (properties.major, properties.minor)
        )
        self.architecture, self.name = f"sm_{properties.major}{properties.minor}", properties.name

    @property
    def stream(self) -> int:
        """The stream on which work is started, as the kernels take it."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    @property
    def capture(self) -> StepCapture | None:
        """The step that is captured here now, None while none is."""
        capture = capture_on(self.torch_device)
        return capture if capture is None or self._captures_here() else None

    def _captures_here(self) -> bool:
        """Say whether this thread's work is captured: other threads may go on meanwhile."""
        return bool(torch.cuda.is_current_stream_capturing())

    def ops(self) -> Any:
        """Return the operators on this device's tensors."""
        return native.device_ops()

    def load_nvshmem(self) -> None:
        """Load NVSHMEM and its kernels. Raise OperError if they are not there."""
        native.load_nvshmem()

    def segment(self, bytes: int, used_bytes: int) -> DeviceSegment:
        """Return new memory for a heap, to be shared with the node's other ranks; zero. All of it
        is used."""
        segment = DeviceSegment.create(bytes, self.torch_device)
        segment.zero()
        self.synchronize()  # so that others find it zero
        return segment

    def check_no_capture(self) -> None:
        """Raise OperError while anything but oper.graph_step captures a CUDA graph here."""
        if self.capture is None and torch.cuda.is_current_stream_capturing():
            raise OperError(
                "a CUDA graph is being captured, and lookups of tables cannot be in it as they are:"
                " ranks wait for each other on the host. Let oper.graph_step(model, step) capture "
                "the step, or leave lookups out, and capture what comes after them"
            )

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Start work inside on a stream of its own, as graphs require: after earlier work, and
        before later work."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.torch_device)
        stream, current = self._beside, torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def pieces(self) -> Callable[[], Piece]:
        """Return the function that makes the pieces of a step that is going to be captured."""
        gc.collect()  # memory freed during the capture would end it
        self.synchronize()
        pool = torch.cuda.graph_pool_handle()
        return lambda: GraphPiece(pool)

    def captured(self, work: Callable[[], Result]) -> tuple[StepCapture, Result]:
        """Capture what `work` starts, without running it. Return the capture and the result of
        `work`: tensors that have their values whenever the step was run."""
        capture = StepCapture(self.pieces())
        with _nothing_is_freed():
            _captures[self.torch_device] = capture
            try:
                capture.begin()
                with _gradients_are_added_up_here():
                    result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a graph that has failed already
                    capture.end()
                raise
            else:
                capture.end()
            finally:
                del _captures[self.torch_device]
        return capture, result

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors that were made on another stream until this stream's work so
        far is done: a batch may be prepared during the training of another."""
        if self.capture is not None:  # a capture keeps all of its memory
            return
        stream = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            if tensor.device == self.torch_device:
                tensor.record_stream(stream)

    def check_no_copies(self) -> None:
        """Raise OperError while a step is captured, in which nothing is copied from or to the host:
        each run would make the copy again, from or to memory that others have by then."""
        if self.capture is not None:
            raise OperError(
                "expected a step without copies between the host and the device, got one while the "
                "step is captured: let the step before be the same, or call the step as it is"
            )

    def bring(self, tensor: torch.Tensor) -> OnTheWay:
        """Start to copy a tensor to the host, after the work that was started before."""
        self.check_no_copies()
        brought = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        brought.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return OnTheWay(brought, event)

    def written_by_it(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory of the host that kernels can write, int64 and zero."""
        return torch.zeros(shape, dtype=torch.int64, pin_memory=True)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host on the device, filled once the device's earlier work is done.
        The tensor is copied to pinned memory first, because the device reads the host's memory only
        then."""
        self.check_no_copies()
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def memory_bytes(self, ranks: int) -> int:
        """Return all memory of the device, which one rank has to itself, however many share the
        machine."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def new(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the device, whose memory torch keeps."""
        return torch.empty(elements, dtype=dtype, device=self.torch_device)

    def free_memory(self) -> list[FreeMemory]:
        """Return the free memory of the device, once torch has given back its unused memory."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        return [
            FreeMemory(
                f"{self.torch_device}, {properties.name},", f"gpu {properties.uuid}", free_bytes
            )
        ]

    def done(self, seconds: float) -> bool:
        """Wait at most so many seconds for the work that was started on this thread's stream.
        Return whether it is done."""
        milliseconds = int(1000 * seconds)
        return bool(self.ops().stream_is_done(self.stream, milliseconds, self.torch_device))

    def point(self) -> Any:
        """Return a mark of the work that was started on this thread's stream so far, for `after` on
        another; `query` says, in any thread, whether that work is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def after(self, points: Iterable[Any]) -> None:
        """Let later work on this thread's stream come after these points."""
        stream = torch.cuda.current_stream(self.torch_device)
        for point in points:
            stream.wait_event(point)

    def synchronize(self) -> None:
        """Wait until all that was started on the device is done."""
        torch.cuda.synchronize(self.torch_device)


Device = Cpu | Cuda


def device_of(given: torch.device | str | None) -> Device:
    """Return the device that torch names so; None is the CPU. Raise OperError if it cannot be
    used."""
    try:
        named = torch.device("cpu" if given is None else given)
    except RuntimeError as error:
        raise OperError(f"device {given!r}: {first_line(error)}") from error
    if named.type == "cpu":
        return Cpu()
    if named.type == "cuda":
        return Cuda(named)
    raise OperError(f"device {named}: tables are on the CPU or on CUDA devices: give cpu or cuda:0")
