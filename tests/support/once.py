"""What takes seconds to make and only read after that, such as compiled kernels: the first process
of a run that needs it makes it, and the others wait for it instead of making it again."""

import fcntl
from collections.abc import Callable
from pathlib import Path

# What the fixture `once` is: (the name of a folder, what fills the new folder).
Once = Callable[[str, Callable[[Path], object]], Path]


def made_once(run: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of the folder that all processes of a run share. One that `make` failed to
    fill is made anew by the next process that asks."""
    folder, done = run / name, run / f"{name} is made"
    with (run / f"{name} lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
