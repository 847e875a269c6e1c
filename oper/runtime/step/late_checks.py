"""Checks of batches on a device without a wait of the host: errors that the kernels find in a batch
are raised with a later batch.

An id out of range reads row 0, and a batch whose lengths do not fit its values reads nothing, so
the delay harms only the outputs in between. Neither is trained, unless `bounds` lets ids be out of
range; their gradients then go to row 0. The report of a batch, `BatchReport` of
csrc/include/oper/cuda/launchers.h, is int64 [2]: the first bad id, and the first bad bag.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Cuda, OnTheWay
from oper.runtime.step import batch_checks
from oper.runtime.tables.features import Feature
from oper.tables.table import Table

NOTHING_BAD = -1
_MOST_ON_THE_WAY = 2  # batches; if there are more, the host waits for the oldest report
_MOST_BATCHES = 16  # of a step that is captured


class _Checked(NamedTuple):
    """A batch whose report is on its way, with the facts that its error names."""

    report: OnTheWay
    batch: Any  # KeyedJaggedTensor, as it was given
    order: Sequence[int] | None  # of its keys for the module's order
    lookups: Sequence[tuple[Feature, Table]]

    def ordered(self) -> Any:
        """Return the batch with its keys in the module's order."""
        return self.batch if self.order is None else self.batch.permute(self.order)


class _Posted:
    """Reports that captured steps leave of one of their batches: in the host's memory, one slot
    after another, because the host looks at each some runs later. It starts no copy for them."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self._slots = device.written_by_it((2 + _MOST_ON_THE_WAY, 2))  # one on the way more at once
        self._posted = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        self._expected = 0

    def capture(self, report: torch.Tensor) -> None:
        """Let the step leave this report here, each time it is run."""
        arguments = (report, self._slots, self._posted)
        self._device.ops().post_report(*arguments, self._device.stream)

    def next(self, done: Any) -> OnTheWay:
        """Return the report of the run that was started last, which is `done` at that point."""
        slot = self._slots[self._expected % len(self._slots)]
        self._expected += 1
        return OnTheWay(slot, done)


class CapturedCheck(NamedTuple):
    """A batch that a captured step reads, whose report is left each time the step is run."""

    posted: _Posted
    batch: Any
    order: Sequence[int] | None
    lookups: Sequence[tuple[Feature, Table]]


class LateChecks:
    """The reports of one engine's batches; `bounds` as for the engine."""

    def __init__(self, device: Cuda, rank: int, bounds: str) -> None:
        self._device, self._rank, self._bounds = device, rank, bounds
        self._on_the_way = deque[_Checked]()
        self._captured: list[CapturedCheck] = []
        # Kept for all captured steps: a step that was released may still be running.
        self._posted: list[_Posted] = []

    def report(self) -> torch.Tensor:
        """Return a report for the kernels to write."""
        return torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=self._device.torch_device)

    def expect(
        self,
        report: torch.Tensor,
        batch: Any,
        order: Sequence[int] | None,
        lookups: Sequence[tuple[Feature, Table]],
    ) -> None:
        """Bring a report to the host, once the work that was started is done. The `batch` is as it
        was given, before its keys were brought into `order` if that is not None."""
        if self._device.capture is None:
            brought = self._device.bring(report)
            self._on_the_way.append(_Checked(brought, batch, order, lookups))
            return
        if len(self._captured) == len(self._posted):
            raise OperError(
                f"a step was to be captured that looks up more than {_MOST_BATCHES} batches: "
                "capture fewer at a time"
            )
        posted = self._posted[len(self._captured)]
        posted.capture(report)
        self._captured.append(CapturedCheck(posted, batch, order, lookups))

    def begin_capture(self) -> None:
        """Make the memory for reports of a step that is going to be captured: memory made inside
        would be the step's own. To be called before the capture."""
        missing = _MOST_BATCHES - len(self._posted)
        self._posted += [_Posted(self._device) for _ in range(missing)]

    def take_captured(self) -> list[CapturedCheck]:
        """Return the checks of the step that has been captured, and forget them."""
        captured, self._captured = self._captured, []
        return captured

    def expect_again(self, captured: CapturedCheck, given: Mapping[int, Any], done: Any) -> None:
        """Look for the report of a captured step that was just run, and is `done` at that point.
        Batches that were `given` took the place of the captured batches with these `id`s."""
        batch = given.get(id(captured.batch), captured.batch)
        report = captured.posted.next(done)
        self._on_the_way.append(_Checked(report, batch, captured.order, captured.lookups))

    def tell(self, all_of_them: bool = False, now: Any = None) -> None:
        """Raise OperError for the first batch whose report has arrived and names an error; ids out
        of range are treated as `bounds` says. `all_of_them` waits for reports on their way. `now`
        is the batch that is being prepared; errors of other batches are said to be of an earlier
        batch."""
        while self._on_the_way:
            enough = len(self._on_the_way) > _MOST_ON_THE_WAY or all_of_them
            if not (enough or self._on_the_way[0].report.there()):
                return
            checked = self._on_the_way.popleft()
            bad_id, bad_bag = checked.report.get().tolist()
            try:
                if bad_bag != NOTHING_BAD:
                    batch_checks.check_offsets(checked.ordered())
                    raise OperError(f"{_changed('lengths')}: those of bag {bad_bag} did not fit")
                if bad_id != NOTHING_BAD:
                    self._tell_of_ids(checked, bad_id)
            except OperError as error:
                if checked.batch is now:
                    raise
                raise OperError(f"in an earlier batch: {error}") from error

    def _tell_of_ids(self, checked: _Checked, bad_id: int) -> None:
        batch = checked.ordered()
        first = batch_checks.segment_offset(batch).cpu()
        values = batch.values().cpu()
        batch_checks.replace_bad_ids(values, first, checked.lookups, self._rank, self._bounds)
        if self._bounds == "fatal":
            text = f"id number {bad_id} was none of its table's rows"
            raise OperError(f"{_changed('values')}: {text}")


def _changed(what: str) -> str:
    return f"its {what} were changed since it was prepared"
