"""Judgement of a plan: predicted times of the plan and of its possible replacements, and advice.

In: times of candidates on one set of data, bytes that each moves. Out: `Judgement`, which judge.py
makes, and `oper drift`, `oper replan`, the monitor and the report put into words.

A candidate pays if, within the horizon of H steps, its steps save more than its moves take,

    (step of the plan - step of the candidate) · H  >  seconds of moving

and if its step is shorter by more than a threshold, which leaves small differences to chance.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from oper.plan.reference_figures import HeldOutSource


class Choice(StrEnum):
    """Answers to newer data."""

    KEEP = "keep"  # the plan
    REPLAN = "replan"  # move the rows that pay
    FROM_SCRATCH = "from_scratch"
    FULL_COPIES = "full_copies"  # of each row on each rank
    RECOUNT = "recount"  # the log, without the plan's vocabularies; no candidate of a judgement


@dataclass(frozen=True)
class Candidate:
    """Predicted step and transfer time of a choice in seconds, the bytes that it moves over links
    once, and the seconds that moving takes a rank."""

    choice: Choice
    step_seconds: float
    transfer_seconds: float
    moved_bytes: float
    moving_seconds: float


@dataclass(frozen=True)
class Judgement:
    """Candidates on the data that judge them, the running plan first.

    source: the data, which no candidate was made from; None if the new plans were made from them,
    and so are at their best there. reservation: why no better data judge; "" for the later part of
    the newest data. horizon: steps within which moves must pay.
    threshold: share of the step below which a gain is left to chance. too_small: whether the data
    have too few accesses to tell drift from chance, so that the advice is to keep the plan.
    """

    DERIVED: ClassVar = ("advice", "verdict", "worse", "gain_seconds")  # in JSON too
    WHERE_ANY: ClassVar = ("too_small",)  # in JSON if true

    source: HeldOutSource | None
    samples: int
    reservation: str
    horizon: int
    threshold: float
    candidates: tuple[Candidate, ...]
    too_small: bool = False

    def __post_init__(self) -> None:
        choices = [each.choice for each in self.candidates]
        expected = [Choice.KEEP, Choice.REPLAN, Choice.FROM_SCRATCH, Choice.FULL_COPIES]
        if choices not in (expected[:3], expected):
            raise ValueError(
                f"expected the candidates {', '.join(expected)}, the last if it fits; got "
                f"{', '.join(choices)}"
            )

    @property
    def step_seconds(self) -> list[float]:
        """The predicted steps of the candidates."""
        return [each.step_seconds for each in self.candidates]

    @property
    def keep(self) -> Candidate:
        """The running plan."""
        return self.candidates[0]

    @property
    def replan(self) -> Candidate:
        """The plan with the moves that pay."""
        return self.candidates[1]

    @property
    def fresh(self) -> Candidate:
        """The plan from scratch."""
        return self.candidates[2]

    def net_gain(self, candidate: Candidate) -> float:
        """Return the seconds that a candidate saves within the horizon beyond the cost of
        moving."""
        gain = self.keep.step_seconds - candidate.step_seconds
        return gain * self.horizon - candidate.moving_seconds

    def pays(self, candidate: Candidate) -> bool:
        """Return whether a candidate gains more than its moves take, and more than chance."""
        gain = self.keep.step_seconds - candidate.step_seconds
        return self.net_gain(candidate) > 0 and gain > self.threshold * candidate.step_seconds

    def pays_after_steps(self, candidate: Candidate) -> int | None:
        """Return the steps after which a candidate has saved the cost of its moves; None: never."""
        gain = self.keep.step_seconds - candidate.step_seconds
        return math.ceil(candidate.moving_seconds / gain) if gain > 0 else None

    @property
    def best(self) -> Candidate:
        """The candidate other than the running plan that gains most within the horizon. Of
        candidates whose steps differ by at most the threshold the first: replans move the fewest
        bytes."""
        most = max(self.candidates[1:], key=self.net_gain)
        longest = (1 + self.threshold) * most.step_seconds
        return next(
            each
            for each in self.candidates[1:]
            if each == most or (self.net_gain(each) > 0 and each.step_seconds <= longest)
        )

    @property
    def advice(self) -> str:
        """The choice that pays best; keeping the plan if none pays, or the data are too small."""
        pays = not self.too_small and self.pays(self.best)
        return (self.best.choice if pays else Choice.KEEP).value

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        """Advice reduced to "keep" or "replan"."""
        return "keep" if self.advice == Choice.KEEP else "replan"

    @property
    def worse(self) -> float:
        """The share by which the plan's step is longer than that of the best other candidate."""
        best = self.best.step_seconds
        return self.keep.step_seconds / best - 1 if best > 0 else 0.0

    @property
    def gain_seconds(self) -> float:
        """The seconds of a step that the best other candidate saves; negative if it takes
        longer."""
        return self.keep.step_seconds - self.best.step_seconds
