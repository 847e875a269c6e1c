"""Which rank is named where ranks wait for each other, and only some of them are late."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from oper.base.errors import OperError
from oper.runtime.comm.lost_ranks import all_wait, of_collection
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from tests.support.runtime import mortal_ranks

_SECONDS = 1.5


def _work(rank: int, group: Any, does: dict[int, str], nodes: tuple[int, ...] | None) -> str:
    """What is said to a rank whose part of the work is by itself; "" to those that sleep."""
    node, other = (Node.join(group, _SECONDS, nodes) for _ in range(2))
    boards = {"step": Signals(node, ["board"]), "other step": Signals(other, ["board"])}
    time.sleep(0.2 * rank)  # ranks that come a little later wait as well
    call: Callable[[], Any]
    match does[rank]:
        case "sleep":
            time.sleep(3 * _SECONDS)
            return ""
        case "agree":
            call = lambda: node.agree(b"", "nothing")  # noqa: E731
        case "hand over":
            call = lambda: node.gather(b"", "say hello")  # noqa: E731
        case "post, then sleep":
            boards["step"].post("board", 1)
            time.sleep(3 * _SECONDS)
            return ""
        case board:
            boards[board].post("board", 1)
            call = lambda: boards[board].wait("board", 1, f"take a {board}")  # noqa: E731
    with pytest.raises(OperError) as error:
        call()
    return str(error.value)


LATE_ALONE = [
    {0: "step", 1: "other step", 2: "sleep"},
    {0: "step", 1: "agree", 2: "sleep"},
    {0: "agree", 1: "step", 2: "sleep"},
    {0: "hand over", 1: "step", 2: "sleep"},
    {0: "step", 1: "step", 2: "sleep"},
]


@pytest.mark.parametrize("does", LATE_ALONE)
def test_a_rank_that_waits_itself_is_not_named_as_late(does: dict[int, str]) -> None:
    first, second, _ = mortal_ranks.run(3, _work, does, None)
    for text in (first, second):
        assert text.startswith(f"rank 2 did not come within {_SECONDS} s, while rank "), text
        assert "rank 0, process" not in text
        assert "rank 1, process" not in text


NOT_FOR_THE_SAME = [
    {0: "step", 1: "other step", 2: "step"},
    {0: "step", 1: "agree", 2: "step"},
    {0: "agree", 1: "hand over", 2: "step"},
]


@pytest.mark.parametrize("does", NOT_FOR_THE_SAME)
def test_ranks_that_all_wait_are_told_so(does: dict[int, str]) -> None:
    texts = mortal_ranks.run(3, _work, does, None)
    # Whoever gives up first tells the others, which may have seen the same by then.
    assert all(
        text.startswith("all ranks wait, and not for the same (rank 0 for") for text in texts
    )


def test_a_rank_that_waits_for_one_that_sleeps_is_said_to_wait() -> None:
    """Rank 0 waits for rank 1 alone, which waits for rank 2: rank 2 has done what rank 0 needs."""
    does = {0: "step", 1: "other step", 2: "post, then sleep"}
    first, second, _ = mortal_ranks.run(3, _work, does, None)
    told = "rank 1 waits for others to take a other step, and rank 2 of this node for no rank"
    named = "rank 2 did not come within 1.5 s, while rank 1 waited for it to take a other step"
    assert told in first or first.startswith(named)
    assert second.startswith(named) or told in second


def test_ranks_of_two_nodes() -> None:
    first, second, _, last = mortal_ranks.run(
        4, _work, {0: "step", 1: "agree", 2: "sleep", 3: "agree"}, (0, 0, 1, 1)
    )
    told = "rank 1 waits for others to compare nothing"
    for text in (first, second, last):
        assert "rank 2 did not come within" in text or told in text, (first, second, last)
        assert "all ranks wait" not in text


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ([("update", "a"), ("update", "b")], True),
        ([("update", "a"), ("update", "b"), ("save", "a")], True),
        ([("update", "a"), ("save", "b")], False),
        ([("update", "a"), ("save", "a"), ("update", "a")], False),
        ([("update", ""), ("save", "")], False),
    ],
)
def test_collections_are_named_if_waits_read_the_same(
    waits: list[tuple[str, str]], named: bool
) -> None:
    text = all_wait({rank: of_collection(*wait) for rank, wait in enumerate(waits)})
    for rank, (action, table) in enumerate(waits):
        collection = f" in the collection of table '{table}'" if named else ""
        assert f"rank {rank} for others to {action}{collection}" in text
    assert ("collection" in text) == named
