"""The part of a log that a profile counted, taken from the log again.

In: `Plan.log_part`, the batches of a log. Out: the batches of that part. A part is a range of
samples (`rows`), a window of them by number or by a column of times (`window`), a random share
(`sampled`), or several of these at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.logs import Batch, LogOptions
from oper.logs.batches.timestamps import PER_SECOND
from oper.profiling.counting import take
from oper.profiling.sampling import Sampling
from oper.profiling.windows import checked_times


@dataclass(frozen=True)
class LogPart:
    """A part of a log, as a plan has it; {} is all of the log."""

    content: dict[str, Any]

    def options(self, given: LogOptions) -> LogOptions:
        """The options of reading the log for this part."""
        options = given
        if "rows" in self.content:
            options = replace(options, rows=self.content["rows"])
        if column := self._window.get("column"):
            options = replace(options, time=column, time_unit=self.content.get("time_unit"))
        return options

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The samples of the part."""
        position = 0
        for batch in batches:
            chosen = self._sampled(position, batch.samples) & self._within(batch, position)
            position += batch.samples
            if chosen.any():
                yield take(batch, chosen)

    def __str__(self) -> str:
        parts = []
        if "rows" in self.content:
            parts.append(f"samples {self.content['rows']}")
        if "from_sample" in self._window:
            first, last = self._window["from_sample"], self._window["to_sample"]
            parts.append(f"the window from sample {first:,} to {last:,}")
        elif self._window:
            first, last = (self._window.get(n, self._window[f"{n}_value"]) for n in ("from", "to"))
            parts.append(f"the window of {self._window['column']} from {first} to {last}")
        if "sampled" in self.content:
            parts.append(f"a sample of {100 * self.content['sampled']['share']:g}%")
        return ", ".join(parts)

    @property
    def _window(self) -> dict[str, Any]:
        window: dict[str, Any] = self.content.get("window", {})
        # Counts that `oper synth` drew have a window that is of no log.
        return window if "column" in window or "from_sample" in window else {}

    def _sampled(self, position: int, samples: int) -> NDArray[np.bool_]:
        if "sampled" not in self.content:
            return np.ones(samples, dtype=bool)
        return Sampling(**self.content["sampled"]).chosen(position, samples)

    def _within(self, batch: Batch, position: int) -> NDArray[np.bool_]:
        window = self._window
        if not window:
            return np.ones(batch.samples, dtype=bool)
        if "column" not in window:
            sample = np.arange(position, position + batch.samples)
            return (sample >= window["from_sample"]) & (sample < window["to_sample"])
        if batch.plain_time and "from" in window:
            raise OperError(
                f"{batch.location.of(0)}: column {window['column']!r} has plain numbers, and the "
                "profile's window was of times: it is another log"
            )
        every, number = self._span(batch)
        found = np.floor(checked_times(batch, window["column"]) / every)
        return np.asarray(found == number)

    def _span(self, batch: Batch) -> tuple[float, float]:
        """The length of a window of times, in the unit of a batch's times, and its number."""
        window = self._window
        if "every" in window:
            return float(window["every"]), float(window["number"])
        # Profiles of before have only the bounds, which may be rounded.
        scale = 1 if batch.plain_time else PER_SECOND[self.content.get("time_unit") or "s"]
        first, last = window["from_value"] / scale, window["to_value"] / scale
        if not 0 < last - first < np.inf:
            raise OperError(
                f"the window of {window['column']!r} from {first} to {last}: cannot be told from "
                "others by its rounded bounds; profile the log again, and make the plan again"
            )
        return last - first, float(np.round(first / (last - first)))
