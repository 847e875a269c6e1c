"""Standard output and standard error of a command that may find them full, closed or left, and in
which what native code prints has no place.

What cannot be written to standard output ends the command: with status 2 and a line on standard
error, or quietly, as other programs end, where the reader of a pipe has gone. What cannot be
written to standard error is dropped, since there is nowhere left to say so. Solvers print remarks
of their own on standard output, also where they are told to be quiet, and a command's JSON would no
longer be JSON: they are dropped too.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

PIPE_LEFT = 128 + signal.SIGPIPE


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within the block, and at its end for what is still held back, failures to write standard
    output raise SystemExit with 2 or PIPE_LEFT, and those of standard error are passed over."""
    _take_closed()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Guarded(sys.stdout or _opened(1), _cannot_write))
    sys.stderr = cast(TextIO, _Guarded(sys.stderr or _opened(2), lambda error: None))
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before


class _Guarded:
    """A text stream that is closed at the first failure to write, so that nothing is tried again
    as the interpreter ends; `failed` is called with the failure."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        if hasattr(stream, "reconfigure"):  # a character that the encoding has not is no failure
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        if self._stream.closed:
            return
        try:
            act(*arguments)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _cannot_write(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        sys.exit(PIPE_LEFT)
    print(
        f"error: standard output: cannot be written ({error.strerror}); free space or send it "
        "elsewhere, and run it again",
        file=sys.stderr,
    )
    sys.exit(2)


def _take_closed() -> None:
    """Give closed standard descriptors something that fails as they do. Otherwise the next file
    that is opened gets the number, and what native code prints goes into it."""
    for number, wrong_way in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, wrong_way)  # takes the lowest free number


def _opened(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", closefd=False)


_lock = threading.Lock()
_inside = 0  # blocks that have begun and not ended, in any thread
_saved = -1  # the descriptor that standard output was, while there are any


@contextlib.contextmanager
def native_output_dropped() -> Iterator[None]:
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
    import ctypes  # not at the top: this module is imported where hardly any file may be opened

    ctypes.CDLL(None).fflush(None)
