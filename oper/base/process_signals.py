"""Signals that end a process: raised as exceptions, or delayed until a critical section is done.

Ctrl-C raises KeyboardInterrupt by itself. SIGTERM and SIGHUP would end the process at once, without
any clean-up, so `raised` turns them into exceptions. Python runs signal handlers only between
bytecodes, and another library may catch an exception in the middle of its import: if the process
has not ended a few seconds after a signal, it exits without clean-up.

A process that another one starts outlives it, unless it asks to `end_with` it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Less than the 10 s that `docker stop` and the 30 s that torchrun wait before they send SIGKILL.
_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """The process received signal `number`, which asks it to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Stopped` within the block, unless they are ignored (nohup),
    and end the process some seconds after them or Ctrl-C, whatever happens to the exception."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    with (
        _handled_by(stop, lambda current: current is signal.SIG_DFL) as numbers,
        _exit_after_grace([*numbers, *_interrupts()]),
    ):
        yield


def _interrupts() -> list[int]:
    """Return SIGINT if it raises KeyboardInterrupt in this thread."""
    in_main = threading.current_thread() is threading.main_thread()
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [signal.SIGINT] if in_main and raises else []


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay signals that arrive within the block until its end."""
    arrived: list[int] = []
    try:
        with _handled_by(lambda number, frame: arrived.append(number), lambda current: True):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def end_with(parent: int | None) -> None:
    """Have Linux kill this process as soon as the process `parent`, which started it, is gone, even
    by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


@contextlib.contextmanager
def _handled_by(
    handler: Callable[[int, Any], None], wanted: Callable[[Any], bool]
) -> Iterator[list[int]]:
    """Replace those of the signals' handlers that are `wanted` by `handler`; yields the signals."""
    before: dict[signal.Signals, Any] = {}
    try:
        # Python runs handlers in the main thread only, and only that thread may set them.
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                current = signal.getsignal(number)
                # None: a handler that Python did not install and could not restore.
                if current not in (signal.SIG_IGN, None) and wanted(current):
                    before[number] = current
                    signal.signal(number, handler)
        yield list(before)
    finally:
        for number, current in before.items():
            signal.signal(number, current)


@contextlib.contextmanager
def _exit_after_grace(numbers: list[int]) -> Iterator[None]:
    """Exit if the process has not ended by itself soon after one of these signals."""
    if not numbers:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()

    def watch() -> None:
        # The interpreter writes one byte a signal, even while the main thread is in native code.
        while byte := os.read(reader, 1):
            if byte[0] in numbers and not ended.wait(_GRACE_SECONDS):
                name = signal.Signals(byte[0]).name
                with contextlib.suppress(OSError):
                    print(
                        f"stopped by {name} in the middle of a step; the next command that writes "
                        "to the same path removes what was left",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(128 + byte[0])
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
