"""A captured step: pieces of a device's work, each of which is started as a whole, and what the
host does before and between them.

A CUDA graph has the work of a stream as it was when it was captured; starting it takes the host as
long as starting a kernel or two. What is captured is not run. Ranks of a node wait for each other
on the host (comm/progress_signals.py), which no graph has in it: so a step is captured in pieces,
which end where the host has something to do, and is run by going through pieces and host's work in
their order.
"""

from collections.abc import Callable
from typing import Protocol


class Piece(Protocol):
    """Work of a device that is captured, and then started as a whole any number of times."""

    def begin(self) -> None:
        """Capture what is started on this thread's stream from now on."""

    def end(self) -> bool:
        """Capture no more. Whether anything was captured."""

    def replay(self) -> None:
        """Start it on this thread's stream."""


class StepCapture:
    """One step, while it is captured and afterwards. `new_piece` makes the pieces."""

    def __init__(self, new_piece: Callable[[], Piece]) -> None:
        self._new_piece = new_piece
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._in_order: list[Callable[[], object]] = []
        self._kept: list[object] = []
        self._piece: Piece | None = None
        self.pieces = 0

    def begin(self) -> None:
        """Capture the step's first piece."""
        piece = self._new_piece()
        piece.begin()
        self._piece = piece

    def end(self) -> None:
        """The last piece ends here."""
        piece, self._piece = self._piece, None
        if piece is not None and piece.end():
            self._in_order.append(piece.replay)
            self.pieces += 1

    def here(self, work: Callable[[], object]) -> None:
        """Let the host do this where the capture has come to, each time the step is run. What the
        device has before was started then, and is not done."""
        self.end()
        self._in_order.append(work)
        self.begin()

    def check(self, work: Callable[[], object]) -> None:
        """Let the host do this before it starts the piece that is being captured."""
        self._in_order.append(work)

    def before(self, work: Callable[[], object]) -> None:
        """Let the host do this once before all else, each time the step is run."""
        if work not in self._before:
            self._before.append(work)

    def after(self, work: Callable[[], object]) -> None:
        """Let the host do this once after all else, each time the step is run."""
        if work not in self._after:
            self._after.append(work)

    def keep(self, memory: object) -> None:
        """Hold memory that was there before, and which the captured work reads or writes."""
        self._kept.append(memory)

    def run_before(self) -> None:
        """What the host does before all else."""
        for work in self._before:
            work()

    def run_after(self) -> None:
        """What the host does after all else."""
        for work in self._after:
            work()

    def run(self) -> None:
        """The step, but for that."""
        for work in self._in_order:
            work()
