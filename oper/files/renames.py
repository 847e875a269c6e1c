"""Renames that lose nothing: two names exchanged in one step, and a name that is given once.

Linux does both by renameat2, where the file system can: ext4, XFS, Btrfs and tmpfs do, NFS does
not.
"""

import ctypes
import errno
import os
from pathlib import Path

from oper.files import signals

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names, whatever they stand for; False where that cannot be done in one step."""
    return _renameat2(one, other, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename to a name that nothing has; FileExistsError where something has it."""
    if _renameat2(source, target, _NOREPLACE):
        return
    with signals.held():
        try:
            os.link(source, target)
            source.unlink()
        except OSError as error:
            # Folders have no links either.
            if error.errno not in _NO_LINKS:
                raise
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
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))
