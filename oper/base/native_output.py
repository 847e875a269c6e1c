"""Drops what native code prints: solvers print remarks of their own on standard output, also where
they are told to be quiet, and a command's JSON would no longer be JSON."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0  # blocks that have begun and not ended, in any thread
_saved = -1  # the descriptor that standard output was, while there are any


@contextlib.contextmanager
def dropped() -> Iterator[None]:
    """Within the block nothing that is printed on file descriptor 1 appears."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _saved
    with _lock:
        if _inside == 0:
            _flush()
            try:
                _saved = os.dup(1)
            except OSError:  # it is closed: nothing can appear
                _saved = -1
            else:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.close(nowhere)
        _inside += 1


def _leave() -> None:
    global _inside, _saved
    with _lock:
        _inside -= 1
        if _inside == 0 and _saved >= 0:
            _flush()
            os.dup2(_saved, 1)
            os.close(_saved)
            _saved = -1


def _flush() -> None:
    """Write out what Python and the C library still hold back."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
