"""Hidden names next to a destination, for new content that is being written and for old content.

`.NAME.HOSTRANDOM.oper-tmp` is unfinished, or no longer needed. The process that writes it holds a
lock (flock) on it until it ends, even by a kill, so that the next command with the same destination
can tell that it was abandoned, and removes it. HOST is a digest of the host's name, because locks
of other hosts may be invisible. `….oper-old` is the old content of the destination between two
renames; it is put back if the destination is missing, and removed only if oper wrote all of it. On
a file system without locks nothing is removed.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

UNFINISHED, OLD = "oper-tmp", "oper-old"


class Temporary:
    """New folder or file next to `destination`, held by this process until it is closed.

    Its permissions are those of the file or folder at `destination`, or the default of the umask.
    """

    def __init__(self, destination: Path, folder: bool) -> None:
        self._destination = destination
        self._mode = _mode(destination)
        while True:
            self.path = hidden_name(destination, UNFINISHED)
            if folder:
                self.path.mkdir(0o777 if self._mode is None else self._mode | stat.S_IRWXU)
            else:
                mode = 0o666 if self._mode is None else self._mode | stat.S_IRUSR | stat.S_IWUSR
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
            # Another command may remove it between creation and lock: then it is created again.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._handle = self._opened()
                with contextlib.suppress(BlockingIOError):
                    _lock(self._handle)
                    if self._exists():
                        return
                os.close(self._handle)

    def _opened(self) -> int:
        try:
            return _open(self.path)
        except OSError:
            # Neither removal needs a free descriptor.
            with contextlib.suppress(OSError):
                (self.path.rmdir if self.path.is_dir() else self.path.unlink)()
            raise

    def take_mode(self) -> None:
        """Give it the mode of the file or folder that it replaces, if there is one."""
        if self._mode is not None:
            self.path.chmod(self._mode)

    def rename(self, kind: str) -> None:
        """Give it a hidden name of another kind."""
        path = hidden_name(self._destination, kind)
        self.path.rename(path)
        self.path = path

    def close(self) -> bool:
        """Remove it, unless it has been renamed to its destination, and release the lock.

        Return False if it could not be removed.
        """
        # After an exchange of names, the hidden name belongs to the old content.
        if self._exists():
            remove(self.path)
        left = self._exists()
        os.close(self._handle)
        return not left

    def _exists(self) -> bool:
        held = os.fstat(self._handle)
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)


def _mode(path: Path) -> int | None:
    """Return the permissions of a file or folder; None if it is missing."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


def hidden_name(destination: Path, kind: str) -> Path:
    """Return an unused hidden name next to a destination."""
    name = f".{destination.name}.{_host()}{secrets.token_hex(4)}.{kind}"
    return destination.with_name(name)


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible, without errors."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def discard(old: Path, destination: Path) -> None:
    """Remove the old content of a destination. It is renamed first, so that no other command sees
    a half-removed folder under a name of old content."""
    garbage = hidden_name(destination, UNFINISHED)
    old.rename(garbage)
    remove(garbage)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder, if possible, so that no other command takes it for an abandoned one."""
    handle = _open(path)
    try:
        with contextlib.suppress(BlockingIOError):
            _lock(handle)
        yield
    finally:
        os.close(handle)


def sweep(destination: Path, whole: Callable[[Path], bool]) -> None:
    """Remove or put back remains of dead processes next to a destination (see above).

    `whole` returns whether oper wrote everything in a folder.
    """
    pattern = re.compile(
        rf"\.{re.escape(destination.name)}\.([0-9a-f]{{8}})[0-9a-f]{{8}}\.({UNFINISHED}|{OLD})"
    )
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(destination.parent) if pattern.fullmatch(name)]
        hidden = [(path, path.lstat()) for path in map(destination.with_name, names)]
        for path, status in sorted(hidden, key=lambda pair: -pair[1].st_ctime):
            match = pattern.fullmatch(path.name)
            assert match is not None
            if status.st_uid == os.getuid():
                _sweep(path, destination, match[1] == _host(), match[2], whole)


def _sweep(
    path: Path, destination: Path, from_here: bool, kind: str, whole: Callable[[Path], bool]
) -> None:
    try:
        handle = _open(path)
    except OSError:
        return
    try:
        dead = _lock(handle) and from_here
        if kind == UNFINISHED:
            if dead:
                remove(path)
        elif not os.path.lexists(destination):
            path.rename(destination)
        elif dead and whole(path):
            discard(path, destination)
    except BlockingIOError:
        return  # a running process holds it
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    # NFS grants locks only on files that are open for writing.
    mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
    return os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(handle: int) -> bool:
    """Lock an open file; return False if the file system has no locks, and raise BlockingIOError if
    another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise
        return False
    return True


def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"
