"""The stage: a thread that makes batches ahead of the training loop."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Stage:
    """Calls `make(stopped)` in a thread, at most `ahead` results before they are asked for, until
    it returns None or raises; `stopped` is whether no more are wanted."""

    def __init__(self, make: Callable[[bool], Any], ahead: int) -> None:
        self._make, self._made = make, queue.SimpleQueue[Any]()
        # Taken before a batch is begun and not when it is ready: ranks whose loops have asked for
        # as many batches then stand at the same one, and none waits for another in a collective.
        self._room = threading.Semaphore(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oper dispatch", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next result; None after the last one. Raises what `make` raised."""
        made = self._made.get()
        self._room.release()
        if isinstance(made, BaseException):
            raise made
        return made

    def stop(self, seconds: float) -> bool:
        """Want no more; whether the thread has ended within so long."""
        self._stopped.set()
        self._room.release()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                made = self._make(self._stopped.is_set())
                self._made.put(made)
                if made is None:
                    return
        except BaseException as error:
            self._made.put(error)
