"""Limits on the number of open files: of a process (`ulimit -n`) and of the machine."""

import errno
import os
import sys

# Files that imports and commands hold open at once, and some more.
_NEEDED = 32

REMEDY = "allow more open files, as by `ulimit -n 65536`, and run it again"


def are_too_many(error: OSError) -> bool:
    """Return whether a file could not be opened because too many are."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def check() -> None:
    """Exit with status 2 and a line on standard error if hardly any file can be opened: imports
    would then fail, with misleading errors."""
    opened: list[int] = []
    try:
        while len(opened) < _NEEDED:
            opened.append(os.dup(2))
    except OSError as error:
        print(
            f"error: {error.strerror}: expected to open {_NEEDED} more files, got {len(opened)}; "
            f"{REMEDY}",
            file=sys.stderr,
        )
        sys.exit(2)
    finally:
        for number in opened:
            os.close(number)
