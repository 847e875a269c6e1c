"""The stage: a thread that makes batches ahead of the training loop."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Stage:
    """Calls `make(stopped)` in a thread, at most `ahead` results before they are asked for, until
    it returns None or raises. `stopped` is None, or else why no more are wanted."""

    def __init__(self, make: Callable[[str | None], Any], ahead: int) -> None:
        self._make, self._made = make, queue.SimpleQueue[Any]()
        # Taken before a batch is begun and not when it is ready: ranks whose loops have asked for
        # as many batches then stand at the same one, and none waits for another in a collective.
        self._room = threading.Semaphore(ahead)
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name="oper dispatch", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next result; None after the last one. Raises what `make` raised."""
        made = self._made.get()
        self._room.release()
        if isinstance(made, BaseException):
            raise made
        return made

    def stop(self, seconds: float, reason: str = "") -> bool:
        """Want no more, for a `reason` that is told to the others, or for none; whether the thread
        has ended within so long."""
        if self._stopped is None:
            self._stopped = reason
        self._room.release()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                made = self._make(self._stopped)
                self._made.put(made)
                if made is None:
                    return
        except BaseException as error:
            self._made.put(error)
