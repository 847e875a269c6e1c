"""Report of a monitor on a period: a line of text, a line of JSON, figures for a dashboard.

In: predictions, counts and a judgement. Out: `PeriodReport`. `oper top` reads the JSON lines.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from oper.analysis.wording import CHOICES
from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.monitoring.traffic import Traffic
from oper.plan.plan_file import to_json, typed
from oper.planner.replan.judgement import Choice, Judgement

SCHEMA = "oper.monitor"
VERSION = 2
_SCALARS = {  # names of steps on a dashboard
    Choice.KEEP: "running_plan",
    Choice.REPLAN: "replanned",
    Choice.FROM_SCRATCH: "plan_from_scratch",
    Choice.FULL_COPIES: "full_copies",
}
_LAST_SECOND = 250e9  # since 1970, in the year 9892: within the range of dates


@dataclass(frozen=True)
class Moving:
    """The plan's folder that a model's rows move to, and the steps of the migration, made and in
    all; 0 of 0 before the ranks have begun."""

    plan: str
    steps_made: int = 0
    steps: int = 0

    def __str__(self) -> str:
        if not self.steps:
            return f"migrating to {self.plan}, not begun"
        return f"migrating to {self.plan}, step {self.steps_made:,} of {self.steps:,}"


@dataclass(frozen=True)
class PeriodReport:
    """A period of a run.

    period: its number, from 0. ended: its end, in seconds since 1970. last_iteration: iterations
    that the ranks have begun in the run so far. iterations: those of this period.
    counted_iterations: those counted row by row, with `samples` and `accesses` of all ranks.
    plan_batch_size: samples of an iteration of `predicted`. why_not_judged: the reason that there
    is no judgement; "" if there is one. new_plan: the folder of the plan that was made; "" if none
    was. moving: the migration that goes on as the period ends, or begins with the new plan; None if
    there is none.
    """

    DERIVED: ClassVar = ("batch_size",)  # in JSON in addition to the fields
    WHERE_ANY: ClassVar = ("moving",)  # in JSON if there is one

    period: int
    ended: float
    last_iteration: int
    iterations: int
    counted_iterations: int
    samples: int
    accesses: int
    plan_batch_size: int
    predicted: Traffic
    counted: Traffic
    judgement: Judgement | None
    why_not_judged: str
    new_plan: str = ""
    moving: Moving | None = None

    @property
    def batch_size(self) -> float:
        """Samples of an iteration on all ranks, as counted."""
        return self.samples / max(self.counted_iterations, 1)

    @property
    def verdict(self) -> str:
        """The state of the plan: keep, replan, not judged, new plan, or migrating."""
        if self.moving is not None:
            return "migrating"
        if self.new_plan:
            return "new plan"
        return "not judged" if self.judgement is None else self.judgement.verdict

    def to_json(self) -> dict[str, Any]:
        """Return the content of a line of the file of JSON lines."""
        return {"schema": SCHEMA, "version": VERSION, **to_json(self)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "PeriodReport":
        """Return the report of which `to_json` made `content`; ValueError if it did not."""
        if content.get("schema") != SCHEMA or content.get("version") != VERSION:
            raise ValueError(
                f"expected schema {SCHEMA!r}, version {VERSION}, got "
                f"{str(content.get('schema'))[:40]!r}, version {str(content.get('version'))[:40]!r}"
            )
        try:
            ranks = len(content["predicted"]["lookups"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        report = typed(content, PeriodReport, ranks)
        if not 0 <= report.ended < _LAST_SECOND:
            raise ValueError(f"ended: {report.ended} is no time")
        return report

    def line(self) -> str:
        """Return the report as a line of JSON."""
        return json.dumps(self.to_json(), allow_nan=False) + "\n"

    def sentence(self) -> str:
        """Return the report as a line of a log."""
        predicted, counted = self.predicted, self.counted
        said = [
            f"{plural(self.iterations, 'iteration')}, {self.counted_iterations:,} counted",
            f"lookups min/max {format_share(counted.lookups_dob, 1)} "
            f"(plan {format_share(predicted.lookups_dob, 1)})",
            f"{format_share(counted.replica_share, 1)} from copies "
            f"(plan {format_share(predicted.replica_share, 1)})",
            f"{format_bytes(counted.communication_bytes.total)} between ranks "
            f"(plan {format_bytes(predicted.communication_bytes.total)})",
        ]
        return f"period {self.period}: {'; '.join([*said, self.judged()])}"

    def judged(self) -> str:
        """Return the verdict and its reason."""
        judgement = self.judgement
        state = self.verdict if self.moving is None else str(self.moving)
        if judgement is None:
            return f"{state}: {self.why_not_judged}" if self.moving is None else state
        steps = [
            f"{CHOICES[each.choice]} {format_duration(each.step_seconds)}"
            for each in judgement.candidates[1:]
        ]
        said = (
            f"{state}: a step takes {format_duration(judgement.keep.step_seconds)}, "
            f"{', '.join(steps)} ({format_percent(judgement.threshold)} tolerated)"
        )
        if not judgement.replan.moved_bytes:
            return said
        after = judgement.pays_after_steps(judgement.replan)
        pays = "never pay" if after is None else f"pay after {plural(after, 'step')}"
        moves = f"moves of {format_bytes(judgement.replan.moved_bytes)} {pays}"
        named = self.new_plan and self.moving is None
        return f"{said}; {self.new_plan}: {moves}" if named else f"{said}; {moves}"

    def scalars(self) -> dict[str, float]:
        """Return figures for a dashboard, by name."""
        scalars: dict[str, float] = {}
        for which, traffic in (("predicted", self.predicted), ("counted", self.counted)):
            scalars |= {
                f"oper/lookups_min_over_max/{which}": traffic.lookups_dob,
                f"oper/replica_share/{which}": traffic.replica_share,
                f"oper/bytes_between_ranks/{which}": traffic.communication_bytes.total,
            }
        if self.judgement is not None:
            scalars |= {
                f"oper/step_seconds/{_SCALARS[each.choice]}": each.step_seconds
                for each in self.judgement.candidates
            }
            scalars["oper/worse_than_best"] = self.judgement.worse
        return scalars
