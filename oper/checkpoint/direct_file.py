"""New file that bypasses the page cache, with the SHA-256 of its bytes.

Bytes are gathered in a few buffers. Two threads hash and write a full buffer while others are
filled. If the file system supports O_DIRECT, the kernel neither copies bytes nor keeps pages, which
is most of its work for a checkpoint; otherwise pages are dropped as soon as the disk has them,
because a checkpoint would evict everything else from the cache.
"""

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

BUFFERS, BUFFER_BYTES = 8, 1 << 21
_BLOCK_BYTES = 4096  # direct writes have whole blocks


class _Filled(NamedTuple):
    """Buffer that two threads read."""

    buffer: mmap.mmap
    hashed: Future[None]
    written: Future[None]


class DirectFile:
    """New file at `path`, to be closed or abandoned."""

    def __init__(self, path: Path) -> None:
        self._digest = hashlib.sha256()
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._free = [mmap.mmap(-1, BUFFER_BYTES, flags=private) for _ in range(BUFFERS)]
        self._filled: deque[_Filled] = deque()
        self._buffer, self._held = self._free.pop(), 0
        self.bytes = 0
        # Last, so that a lack of memory for the rest leaves nothing open.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct = True
        try:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:  # as of tmpfs, on older kernels
            self._direct = False

    def write(self, data: Any) -> int:
        """Append bytes. Raise OSError if there was no room for some of them or of earlier ones."""
        content = memoryview(data).cast("B")
        taken = 0
        while taken < len(content):
            part = content[taken : taken + BUFFER_BYTES - self._held]
            self._buffer[self._held : self._held + len(part)] = part
            self._held += len(part)
            taken += len(part)
            self.bytes += len(part)
            if self._held == BUFFER_BYTES:
                self._pass_on()
                self._buffer, self._held = self._next(), 0
        return len(content)

    def close(self) -> str:
        """Wait until the disk has all bytes, close the file, and return the SHA-256 of its
        bytes."""
        if self._held:
            self._pass_on()
        while self._filled:
            self._emptied()
        os.ftruncate(self._descriptor, self.bytes)
        os.fsync(self._descriptor)
        self.abandon()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close the file, complete or not."""
        for pool in (self._hasher, self._writer):
            pool.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _pass_on(self) -> None:
        """Pass the filled part of the buffer to the threads that hash and write it."""
        view = memoryview(self._buffer)
        start = self.bytes - self._held
        hashed = self._hasher.submit(self._digest.update, view[: self._held])
        whole = -(-self._held // _BLOCK_BYTES) * _BLOCK_BYTES
        written = self._writer.submit(self._write_at, view[:whole], start)
        self._filled.append(_Filled(self._buffer, hashed, written))

    def _next(self) -> mmap.mmap:
        """Return an empty buffer."""
        return self._free.pop() if self._free else self._emptied()

    def _emptied(self) -> mmap.mmap:
        """Return the buffer that was filled first, once it is written."""
        filled = self._filled.popleft()
        filled.hashed.result()
        filled.written.result()
        return filled.buffer

    def _write_at(self, data: memoryview, start: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # Direct writes need other sizes or alignment here.
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._direct = False
        if not self._direct:
            os.posix_fadvise(self._descriptor, 0, start + done, os.POSIX_FADV_DONTNEED)
