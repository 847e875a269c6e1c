"""The errors that name ranks that failed, died, left or are late, in words that are true on every
rank."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from oper.base.errors import OperError

_COLLECTION = " in the collection of table "


class LostRankError(OperError):
    """A rank failed, died or is late. The text is true on every rank, and is passed on as it is."""


def told(rank: int, error: BaseException) -> str:
    """Return the text on a rank's error for the other ranks; a LostRankError stays as it is."""
    if isinstance(error, LostRankError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was interrupted"
    kind = "" if isinstance(error, OperError) else type(error).__name__
    return f"rank {rank} failed: {': '.join(filter(None, [kind, str(error)]))}"


def died(dead: Collection[int], rank: int, action: str) -> str:
    """Return the text that ranks died, while `rank` waited for them to do `action`."""
    return (
        f"{rank_names(dead)} died while rank {rank} waited for {pronoun(dead)} to {action}: "
        f"see the last output of {pronoun(dead)}"
    )


def left(gone: Collection[int], rank: int, action: str) -> str:
    """Return the text that ranks ended or released their tables, while `rank` waited for them."""
    return (
        f"{rank_names(gone)} left while rank {rank} waited for {pronoun(gone)} to {action}: "
        "the script ended there, or released its tables; all ranks must take equally many steps "
        "and the same calls"
    )


def did_not_come(
    late: Collection[int], seconds: float, rank: int, action: str, processes: Mapping[int, int]
) -> str:
    """Return the text that ranks did not come in time, with the states of their processes if these
    can be seen. Other ranks that are stopped, and would be late next, are named with them."""
    stopped = {r: is_stopped(process) for r, process in processes.items()}
    seen = ", ".join(
        f"rank {r}, process {processes[r]}, is {'stopped' if stopped[r] else 'alive'}"
        for r in sorted(stopped)
        if stopped[r] or r in late
    )
    text = (
        f"{rank_names(late)} did not come within {seconds:g} s, while rank {rank} waited for "
        f"{pronoun(late)} to {action}" + (f" ({seen})" if seen else "")
    )
    if any(stopped.values()):
        return text
    return (
        f"{text}: all ranks must take equally many steps and the same calls; where one only needs "
        "longer, set deadline_seconds"
    )


def of_collection(action: str, table: str) -> str:
    """Return an action with the collection that it is part of, by its first table; "" for none."""
    return f"{action}{_COLLECTION}{table!r}" if table else action


def all_wait(reasons: Mapping[int, str]) -> str:
    """Return the text that all ranks wait, each for the others to do something else. It names
    collections if ranks wait for one action in several."""
    actions = {rank: what.partition(_COLLECTION)[0] for rank, what in reasons.items()}
    if len({*actions.values()}) == len({*reasons.values()}):
        reasons = actions
    waits = "; ".join(f"rank {r} for others to {what}" for r, what in sorted(reasons.items()))
    return (
        f"all ranks wait, and not for the same ({waits}): they must call what all ranks take "
        "part in alike and in the same order"
    )


def rank_names(ranks: Collection[int]) -> str:
    """Return the name of ranks in a sentence."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def is_stopped(process: int | None) -> bool:
    """Say whether a process is seen to be stopped; None is a process that cannot be seen."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[0] in "Tt"
    return False


def pronoun(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
