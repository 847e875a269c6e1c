"""Ranks that failed, died or are late, in words that are true on every rank."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from oper.base.errors import OperError


class LostRankError(OperError):
    """What became of a rank, in words that are true on every rank: not wrapped when told on."""


def told(rank: int, error: BaseException) -> str:
    """What the others are told of a rank's error: what came first, once."""
    if isinstance(error, LostRankError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was interrupted"
    kind = "" if isinstance(error, OperError) else type(error).__name__
    return f"rank {rank} failed: {': '.join(filter(None, [kind, str(error)]))}"


def died(dead: Collection[int], rank: int, doing: str) -> str:
    """That ranks died."""
    return (
        f"{rank_names(dead)} died while rank {rank} waited for {pronoun(dead)} to {doing}: "
        f"see the last output of {pronoun(dead)}"
    )


def did_not_come(
    late: Collection[int], seconds: float, rank: int, doing: str, processes: Mapping[int, int]
) -> str:
    """That ranks did not come, and how their processes are, where these can be seen."""
    states = {r: _state(processes[r]) for r in late if r in processes}
    seen = ", ".join(f"rank {r}, process {processes[r]}, is {state}" for r, state in states.items())
    text = (
        f"{rank_names(late)} did not come within {seconds:g} s, while rank {rank} waited for "
        f"{pronoun(late)} to {doing}" + (f" ({seen})" if seen else "")
    )
    if "stopped" in states.values():
        return text
    return (
        f"{text}: all ranks must take equally many steps and the same calls; where one only needs "
        "longer, set deadline_seconds"
    )


def rank_names(ranks: Collection[int]) -> str:
    """Ranks in a sentence."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _state(process: int) -> str:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        if status.rpartition(")")[2].split()[0] in "Tt":
            return "stopped"
    return "alive"


def pronoun(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
