"""Standard output and standard error of a command, which may be full, closed or left, and from
which output of native code is kept out.

A failed write to standard output ends the command: with status 2 and a line on standard error, or
quietly, like other programs, if the reader of a pipe has gone. A failed write to standard error is
dropped, because no stream is left to report it. Solvers print remarks on standard output, even in
quiet mode, which would corrupt a command's JSON: they are dropped too.
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
    """Make failures to write standard output raise SystemExit with 2 or PIPE_LEFT, within the block
    and at its end for buffered output, and ignore those of standard error."""
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
    """Text stream that is closed at the first failure to write, so that the interpreter does not
    retry at its end; `failed` is called with the failure."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        if hasattr(stream, "reconfigure"):  # a character that the encoding lacks is not a failure
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
    """Give closed standard descriptors a file that fails like them. Otherwise the next file that is
    opened gets the number, and output of native code goes into it."""
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
    """Drop everything that is printed on file descriptor 1 within the block."""
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
    """Write out the buffers of Python and the C library."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    import ctypes  # not at the top: this module must be importable if hardly any file can be opened

    ctypes.CDLL(None).fflush(None)
