"""Renames that overwrite nothing: exchange two names in one step, or fail if the name is taken.

Linux does both by renameat2 if the file system supports it: ext4, XFS, Btrfs and tmpfs do, NFS does
not.
"""

import ctypes
import errno
import os
from pathlib import Path

from oper.base import process_signals

_AT_FDCWD = -100  # <fcntl.h>
_NOREPLACE, _EXCHANGE = 1, 2  # <linux/fs.h>
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders; return False if the file system cannot do it."""
    return _renameat2(one, other, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename to an unused name; raise FileExistsError if the name is taken."""
    if _renameat2(source, target, _NOREPLACE):
        return
    with process_signals.held():
        try:
            os.link(source, target)
            source.unlink()
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Hard links are not possible here, as for folders: check, then rename.
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            source.rename(target)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))
