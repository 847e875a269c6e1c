"""Output of `oper plan explain`: one plain sentence first, details with -v alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.analysis.row_facts import CountBasis, RowCost, RowFacts, RowReason, explain
from oper.cli.plan_commands.row_text import ranges, row_sentences
from tests.support.commands import fine

STRIPED = RowFacts(
    table="C3",
    row=4711,
    kind="striped",
    memory="device",
    accesses=None,
    accesses_at_least=0,
    accesses_at_most=66,
    partition=None,
    owner=3,
    replicas=[],
    slots={3: 1374},
    source=[3, 3, 3, 3],
    why=RowReason.COLD,
)
LISTED = replace(STRIPED, kind="listed", accesses=1, owner=1, why=RowReason.NEVER_READ)
COPIED = replace(
    STRIPED,
    kind="replicated",
    accesses_at_least=12,
    owner=None,
    replicas=[0, 1, 2, 3],
    why=RowReason.ROOM_EVERYWHERE,
)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            STRIPED,
            "read at most 66 times; cold rows are spread over the ranks in turn; this one is on "
            "rank 3",
        ),
        (
            replace(STRIPED, accesses_at_most=None),
            "cold rows are spread over the ranks in turn; this one is on rank 3",
        ),
        (
            replace(STRIPED, accesses=0),
            "never read; cold rows are spread over the ranks in turn; this one is on rank 3",
        ),
        (
            replace(STRIPED, why=RowReason.STAYED, accesses=5),
            "read 5 times in the profile; it stayed where the previous plan had it, as moving it "
            "would not pay: it is on rank 3",
        ),
        (LISTED, "on rank 1 alone; read 1 time in the profile"),
        (
            replace(LISTED, memory="host"),
            "on rank 1, in its host's memory (the table is in the tier); read 1 time in the "
            "profile",
        ),
        (COPIED, "a copy on every rank; read at least 12 times (--profile has the count)"),
        (
            replace(COPIED, replicas=[0, 2, 3], accesses=1234),
            "a copy on ranks 0, 2-3 of 4; read 1,234 times in the profile",
        ),
    ],
)
def test_the_first_sentence(found: RowFacts, sentence: str) -> None:
    assert row_sentences(found)[0] == f"Row 4,711 of table C3: {sentence}"


COST = RowCost(reads=2.0, basis=CountBasis.PLANNED, one_owner_seconds=2e-6, everywhere_seconds=1e-6)


@pytest.mark.parametrize("why", RowReason)
def test_every_reason_has_words(why: RowReason) -> None:
    """Reasons of striped rows are in the first sentence; reasons of unread rows need no cost."""
    striped = why in (RowReason.COLD, RowReason.STAYED)
    unread = why in (
        RowReason.ONE_RANK,
        RowReason.NEVER_READ,
        RowReason.UNREAD,
        RowReason.ROOM_EVERYWHERE,
    )
    row = replace(STRIPED if striped else LISTED, why=why, cost=None if unread else COST)
    said = row_sentences(row)
    assert len(said) == (1 if striped else 2)
    if not (striped or unread):
        assert said[1].startswith("Why: each rank reads it 2 times a step")


def test_every_row_of_a_plan_has_a_sentence_and_details_only_with_v(here: Path) -> None:
    fine(
        *[
            "plan",
            "p",
            "-o",
            "new",
            "--topology",
            "2x2-a100",
            "--mode",
            "inference",
            "--extra-memory",
            "20%",
        ]
    )
    kinds = set()
    for row in range(0, 90, 9):
        asked = ("plan", "explain", "new", "--table", "C1", "--row", row)
        content = json.loads(fine(*asked, "--json"))
        kinds.add(content["kind"])
        text, more = (" ".join(fine(*asked, *v).split()) for v in ((), ("-v",)))
        assert text.startswith(f"Row {row} of table C1: ")
        found = explain("new", "C1", row)
        assert content["why"] == found.why
        assert text == " ".join(" ".join(row_sentences(found)).split())
        for word in ("slots", "kind"):
            assert word not in text
            assert word in more
        holders = sorted(map(int, content["slots"]))
        assert (f"rank {holders[0]}" in text) == (len(holders) == 1)
    assert {"replicated", "striped"} <= kinds or {"replicated", "listed"} <= kinds


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(np.arange(1024).tolist()) == "0-1023"
