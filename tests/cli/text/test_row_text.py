"""What `oper plan explain` says of a row: one plain sentence first, details with -v alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.cli.plan_commands.row_text import ranges, row_sentences
from tests.support.commands import fine

STRIPED = {
    "table": "C3",
    "row": 4711,
    "kind": "striped",
    "in_tier": False,
    "accesses": None,
    "accesses_at_least": 0,
    "accesses_at_most": 66,
    "partition": None,
    "owner": 3,
    "replicas": [],
    "slots": {"3": 1374},
    "path": [3, 3, 3, 3],
    "why": "cold rows are spread over the ranks in turn",
}
LISTED = STRIPED | {"kind": "listed", "accesses": 1, "owner": 1, "why": "it has one owner"}
COPIED = STRIPED | {
    "kind": "replicated",
    "accesses_at_least": 12,
    "owner": None,
    "replicas": [0, 1, 2, 3],
    "why": "it pays",
}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            STRIPED,
            "read at most 66 times; cold rows are spread over the ranks in turn; this one is on "
            "rank 3",
        ),
        (
            STRIPED | {"accesses_at_most": None},
            "cold rows are spread over the ranks in turn; this one is on rank 3",
        ),
        (
            STRIPED | {"accesses": 0},
            "never read; cold rows are spread over the ranks in turn; this one is on rank 3",
        ),
        (
            STRIPED | {"why": "it stayed where it was", "accesses": 5},
            "read 5 times in the profile; it stayed where it was: it is on rank 3",
        ),
        (LISTED, "on rank 1 alone; read 1 time in the profile"),
        (
            LISTED | {"in_tier": True},
            "on rank 1, in its host's memory (the table is in the tier); read 1 time in the "
            "profile",
        ),
        (COPIED, "a copy on every rank; read at least 12 times (--profile has the count)"),
        (
            COPIED | {"replicas": [0, 2, 3], "accesses": 1234},
            "a copy on ranks 0, 2-3 of 4; read 1,234 times in the profile",
        ),
    ],
)
def test_the_first_sentence(found: dict[str, Any], sentence: str) -> None:
    assert row_sentences(found)[0] == f"Row 4,711 of table C3: {sentence}"


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
    for row in range(0, 90, 4):
        asked = ("plan", "explain", "new", "--table", "C1", "--row", row)
        content = json.loads(fine(*asked, "--json"))
        kinds.add(content["kind"])
        text, more = (" ".join(fine(*asked, *v).split()) for v in ((), ("-v",)))
        assert text.startswith(f"Row {row} of table C1: ")
        assert content["why"] in text
        for word in ("slots", "kind"):
            assert word not in text
            assert word in more
        holders = sorted(map(int, content["slots"]))
        assert (f"rank {holders[0]}" in text) == (len(holders) == 1)
    assert {"replicated", "striped"} <= kinds or {"replicated", "listed"} <= kinds


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(np.arange(1024).tolist()) == "0-1023"
