"""A captured step: pieces of a device's work, each of which is started as a whole, and the host's
work before and between them.

A CUDA graph has the work of a stream as it was when it was captured; starting it takes the host as
long as starting a kernel or two. Captured work is not run. Ranks of a node wait for each other on
the host (comm/progress_signals.py), which no graph can hold. So a step is captured in pieces that
end at the host's work, and is run by going through pieces and host's work in their order.
"""

from collections.abc import Callable
from typing import Protocol


class Piece(Protocol):
    """Work of a device that is captured, and then started as a whole any number of times."""

    def begin(self) -> None:
        """Capture the work that is started on this thread's stream from now on."""

    def end(self) -> bool:
        """Stop capturing. Return whether anything was captured."""

    def replay(self) -> None:
        """Start the piece on this thread's stream."""


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
        """End the step's last piece."""
        piece, self._piece = self._piece, None
        if piece is not None and piece.end():
            self._in_order.append(piece.replay)
            self.pieces += 1

    def here(self, work: Callable[[], object]) -> None:
        """Let the host do this at the present place of the capture, each time the step is run. The
        device's work before it was started by then, and is not done."""
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
        """Hold memory that was there before the capture and that the captured work reads or
        writes."""
        self._kept.append(memory)

    def run_before(self) -> None:
        """Do the host's work that comes before all else."""
        for work in self._before:
            work()

    def run_after(self) -> None:
        """Do the host's work that comes after all else."""
        for work in self._after:
            work()

    def run(self) -> None:
        """Run the step, without `run_before` and `run_after`."""
        for work in self._in_order:
            work()
