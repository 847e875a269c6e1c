"""Signals that end a process: raised as exceptions, or held back over a step that must be whole.

Ctrl-C raises KeyboardInterrupt by itself. SIGTERM and SIGHUP end a process at once unless they are
raised too, and then nothing that it began is cleaned up. Python raises only between its own steps:
where one waits or computes in native code for longer than a while, the process ends without.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS = 5.0  # less than torchrun and container engines wait before they kill


class Stopped(BaseException):
    """The process was told to end by signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Stopped` meanwhile; not where they are ignored, as under nohup."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    with (
        _handled_by(stop, lambda current: current is signal.SIG_DFL) as numbers,
        _insisted(numbers),
    ):
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals that come meanwhile take effect at the end, and none of them before."""
    came: list[int] = []
    try:
        with _handled_by(lambda number, frame: came.append(number), lambda current: True):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handled_by(
    handler: Callable[[int, Any], None], wanted: Callable[[Any], bool]
) -> Iterator[list[int]]:
    """`handler` stands in for those of the signals' handlers that are `wanted`; yields which."""
    before: dict[signal.Signals, Any] = {}
    try:
        # Python runs handlers in the main thread alone, so no other has to hold them back.
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                current = signal.getsignal(number)
                # None: a handler that is not Python's, which could not be given back.
                if current not in (signal.SIG_IGN, None) and wanted(current):
                    before[number] = current
                    signal.signal(number, handler)
        yield list(before)
    finally:
        for number, current in before.items():
            signal.signal(number, current)


@contextlib.contextmanager
def _insisted(numbers: list[int]) -> Iterator[None]:
    """End the process where it does not end by itself soon after one of these signals."""
    if not numbers:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()

    def insist() -> None:
        # A byte for each signal, at once, whatever the main thread is doing; nothing at the end.
        while byte := os.read(reader, 1):
            if byte[0] in numbers and not ended.wait(_PATIENCE_SECONDS):
                name = signal.Signals(byte[0]).name
                with contextlib.suppress(OSError):
                    print(
                        f"stopped by {name} in the middle of a step; what it was writing goes "
                        "with the next command that writes there",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(128 + byte[0])
        os.close(reader)

    threading.Thread(target=insist, daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
