"""What a plan predicts is what the runtime counts: to the row where counts of the log decide it,
within their deviation where they are expected values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from tests.support.commands import fine
from tests.support.runtime.traffic_cases import (
    BATCH,
    RANKS,
    SAMPLES,
    STEPS,
    accesses_by_sample,
    count,
    owners,
    write_log,
)
from tests.support.runtime.worlds import Worlds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, its profile `profile`, the profiles `windows@r` of the ranks' parts, and plans."""
    folder = tmp_path_factory.mktemp("counted")
    make(folder, "raw", windows=True)
    fine_plan(folder, "distinct")
    return folder


def make(folder: Path, fetch: str, windows: bool = False, drift: bool = False) -> None:
    log = write_log(folder, drift)
    tables = ("--tables", folder / "tables.yaml")
    measured = ("--batch-size", BATCH, "--ranks", RANKS)
    fine("profile", log, "-o", folder / "profile", *tables, *measured)
    if windows:
        fine("profile", log, "-o", folder / "windows", *tables, "--windows", RANKS)
    fine_plan(folder, fetch)


def fine_plan(folder: Path, fetch: str) -> None:
    workload = ("--batch-size", BATCH, "--fetch", fetch, "--extra-memory", "1%")
    topology = ("--topology", folder / "topology.yaml")
    fine("plan", folder / "profile", "-o", folder / fetch, *topology, *workload)


def counted(ranks: Worlds, folder: Path, fetch: str, whole: bool) -> tuple[Plan, dict[str, Any]]:
    """The counters of all ranks, stacked: [M] each, or [M, M], reader by source."""
    found = ranks.run(RANKS, count, folder / "log.parquet", folder / fetch, whole)
    plan = Plan.load(folder / fetch)
    assert plan.replica_accesses > 0, "nothing is replicated: the test would not see replicas"
    return plan, {name: np.array([of_rank[name] for of_rank in found]) for name in found[0]}


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_each_owner_serves_what_the_plan_says_to_the_row(
    ranks: Worlds, folder: Path, fetch: str
) -> None:
    plan, found = counted(ranks, folder, fetch, whole=False)
    assert found["accessed_rows"].sum(axis=0).tolist() == plan.owner_accesses.tolist()
    assert found["replica_accesses"].sum() == plan.replica_accesses
    assert found["steps"].tolist() == [2 * STEPS] * RANKS  # of two collections


def test_who_reads_from_whom_follows_from_the_profile_of_each_ranks_part(
    ranks: Worlds, folder: Path
) -> None:
    plan, found = counted(ranks, folder, "raw", whole=True)
    owner = np.concatenate(owners(plan))
    for rank in range(RANKS):
        part = Profile.load(f"{folder / 'windows'}@{rank}")
        expected = np.bincount(owner + 1, part.accesses, minlength=RANKS + 1).astype(np.int64)
        assert found["replica_accesses"][rank] == expected[0]
        assert found["accessed_rows"][rank].tolist() == expected[1:].tolist()
        assert found["fetched_rows"][rank].tolist() == expected[1:].tolist()


def test_links_are_the_whole_logs_within_their_deviation(ranks: Worlds, folder: Path) -> None:
    plan, found = counted(ranks, folder, "raw", whole=False)
    per_sample = accesses_by_sample(folder / "log.parquet", plan)
    expected = per_sample.sum(axis=0) / RANKS
    # A rank's samples are a third of the log's, drawn without replacement.
    share = SAMPLES / RANKS
    deviation = np.sqrt(share * (1 - 1 / RANKS) * per_sample.var(axis=0, ddof=1))
    assert (deviation < 0.02 * expected).all(), "the comparison would accept anything"
    assert (np.abs(found["accessed_rows"] - expected) < 4 * deviation).all()
    predicted = STEPS * plan.cost.link_bytes
    assert_close_off_diagonal(found["fetched_bytes"], predicted, 0.05)


def test_distinct_rows_are_within_a_percent_on_a_shuffled_log(ranks: Worlds, folder: Path) -> None:
    plan, found = counted(ranks, folder, "distinct", whole=False)
    measured = Profile.load(folder / "profile").distinct
    assert measured is not None
    # The profile walked the log in the same batches.
    assert found["distinct_rows"].sum() == round(STEPS * RANKS * sum(measured.rank_rows))
    assert np.allclose(measured.rank_ratio, 1, atol=0.01)
    check_expected_bytes(plan, found)
    check_mailbox(plan, measured.rank_rows)


def test_distinct_rows_of_a_log_in_time_order_follow_the_measured_ratio(
    ranks: Worlds, tmp_path: Path
) -> None:
    make(tmp_path, "distinct", drift=True)
    plan, found = counted(ranks, tmp_path, "distinct", whole=False)
    measured = Profile.load(tmp_path / "profile").distinct
    assert measured is not None
    assert max(measured.rank_ratio) < 0.95, "ids do not crowd together in this log"
    assert found["distinct_rows"].sum() == round(STEPS * RANKS * sum(measured.rank_rows))
    check_expected_bytes(plan, found)
    check_mailbox(plan, measured.rank_rows)


def check_mailbox(plan: Plan, distinct_rows: Sequence[float]) -> None:
    """A slot and float32 gradients for each of a table's distinct rows in a rank's batch."""
    row_bytes = [8 + 4 * table.dim for table in plan.tables]
    assert plan.cost.mailbox_bytes == pytest.approx(np.dot(distinct_rows, row_bytes), rel=0.01)


def check_expected_bytes(plan: Plan, found: dict[str, Any]) -> None:
    """Rows fetched and gradients sent, in bytes over all steps, against the plan's expectation."""
    fetched = STEPS * plan.cost.link_bytes
    assert_close_off_diagonal(found["fetched_bytes"], fetched, 0.03)
    away = ~np.eye(RANKS, dtype=bool)
    traffic = plan.cost.communication_bytes
    total = found["fetched_bytes"][away].sum() / STEPS
    assert total == pytest.approx(traffic.fetch, rel=0.01)
    gradients = found["gradient_bytes"][away].sum() / STEPS
    assert gradients == pytest.approx(traffic.gradient, rel=0.01)


def assert_close_off_diagonal(
    found: NDArray[np.int64], expected: NDArray[np.float64], relative: float
) -> None:
    away = ~np.eye(RANKS, dtype=bool)
    np.testing.assert_allclose(found[away], expected[away], rtol=relative)
