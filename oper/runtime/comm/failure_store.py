"""The failure store: the messages of a process group's ranks to each other when something is wrong.

It lies in the group's own store (a TCPStore or FileStore), which all ranks of all nodes reach, and
holds two things: the reason for a rank's failure, and a heartbeat of every rank that has waited for
long. Ranks that are well and do not wait send the store nothing.
"""

import _thread
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from oper.runtime.comm import process_end

_ANSWER_SECONDS = 3.0  # a store that takes longer is lost, with the rank that serves it
_LEAST_SECONDS = 0.5  # for an answer, at a deadline too
_made: Counter[str] = Counter()  # stores made so far, by group


class FailureStore:
    """The failures and heartbeats of one engine's ranks; all ranks of the group make it in the
    same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        # Engines of a group must not read each other's; a name is used again by later groups,
        # which have another store.
        self._prefix = f"oper/{_made[group.group_name]}"
        _made[group.group_name] += 1
        self._store: Any = group.get_group_store()
        self._answered: threading.Event | None = None  # by the thread that asks, if there is one
        self._beats = 0
        self.lost = False  # true if the store did not answer the last question

    def fail(self, text: str, passed_on: bool = False) -> None:
        """Let all ranks read why one of them has failed, unless another rank was first. A failure
        that is only `passed_on` does not wait for the store, which may be lost with the rank that
        failed."""

        def write(store: Any) -> None:
            if not store.check([f"{self._prefix}/failure"]):
                store.set(f"{self._prefix}/failure", text)
                store.check([f"{self._prefix}/failure"])  # once this is answered, it is there

        self._ask(write, _LEAST_SECONDS if passed_on else _ANSWER_SECONDS)

    def failure(self) -> str:
        """Return why a rank has failed; "" if none has."""
        return self._ask(lambda store: self._read(store, "failure")) or ""

    def heartbeat(self, action: str, left: float) -> str:
        """Say that this rank lives and waits for others to do `action`, for `left` seconds more;
        return `failure()`."""
        self._beats += 1

        def write(store: Any) -> str:
            store.set(f"{self._prefix}/waiting/{self._rank}", f"{self._beats} {action}")
            return self._read(store, "failure")

        return self._ask(write, left) or ""

    def heartbeats(self, left: float) -> dict[int, str] | None:
        """Return the last heartbeat of each rank that gave one: its number, and the action that the
        rank waited for. None if the store does not answer; `left` is as in `heartbeat`."""

        def read(store: Any) -> dict[int, str]:
            beats = {rank: self._read(store, f"waiting/{rank}") for rank in range(self._ranks)}
            return {rank: beat for rank, beat in beats.items() if beat}

        return self._ask(read, left)

    def _read(self, store: Any, name: str) -> str:
        key = f"{self._prefix}/{name}"
        return store.get(key).decode(errors="replace") if store.check([key]) else ""

    def _ask(self, question: Callable[[Any], Any], seconds: float = _ANSWER_SECONDS) -> Any:
        """Return the store's answer, over a connection of our own; None without one within
        `seconds`, raised to _LEAST_SECONDS and capped at _ANSWER_SECONDS.

        A store whose host is stopped does not answer, and its calls cannot be interrupted: a thread
        makes them, and is abandoned then. It is no threading.Thread, whose `start` waits without
        end for a thread that had no memory to begin; if no thread can be made, or it has not begun
        by the time of an answer, the calling thread asks.
        """
        answers = []
        began = threading.Event()
        seconds = min(max(seconds, _LEAST_SECONDS), _ANSWER_SECONDS)

        def ask(answered: threading.Event) -> None:
            began.set()
            try:
                with contextlib.suppress(RuntimeError, MemoryError):
                    answers.append(question(self._store.clone()))
            finally:
                answered.set()

        if self._answered is None or self._answered.is_set():
            self._answered = threading.Event()
            process_end.wait_for(self._answered, _ANSWER_SECONDS)
            with contextlib.suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(ask, (self._answered,))
                began.wait(seconds)
            if not began.is_set():
                ask(self._answered)
            self._answered.wait(seconds)
        self.lost = not answers
        return answers[0] if answers else None
