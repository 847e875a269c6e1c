"""Models whose rows migrate, against models whose rows stay."""

import pytest

from oper.scheduler.cache_settings import CacheSettings
from tests.support.torchrec import migration_cases

CACHED = [{}, {"cache": CacheSettings("100%")}]  # all tables on devices, and all in the tier


@pytest.mark.parametrize(
    "name",
    [
        "TrainPipelineBase",
        "TrainPipelineSparseDist",
        "TrainPipelineSparseDistLite",
        "TrainPipelineSemiSync",
    ],
)
@pytest.mark.parametrize("options", CACHED)
def test_rows_migrate_under_pipelines(worlds, name, options):
    assert min(worlds.run(3, migration_cases.moved_in_a_pipeline, name, **options)) > 5


@pytest.mark.parametrize("sync", ["bsp", "on-demand", "peer"])
def test_waiting_gradients_are_added_up_in_one_order(worlds, sync):
    """Whichever of three ranks' comes first: rows that migrate, and flushes, change that."""
    still, moved, flushed = (
        worlds.run(3, migration_cases.summed_as_they_come, sync, between)[0]
        for between in ("nothing", "migrate", "evaluate")
    )
    migration_cases.assert_same_bits(moved, still)
    migration_cases.assert_same_bits(flushed, still)


def test_rows_do_not_migrate_under_gradients_that_are_held_back(worlds):
    worlds.run(2, migration_cases.moved_between_accumulated_steps)


@pytest.mark.parametrize("options", CACHED)
def test_checkpoints_in_the_midst_of_a_migration(worlds, tmp_path, options):
    worlds.run(3, migration_cases.saved_and_loaded_on_the_way, str(tmp_path / "saved"), **options)


def test_mistakes_are_refused_and_change_nothing(worlds):
    worlds.run(3, migration_cases.mistaken)


def test_a_migration_that_a_script_has_lost_is_taken_up_again(worlds):
    worlds.run(3, migration_cases.lost_on_the_way)


def test_rows_move_in_inference_mode_and_out_of_it(worlds):
    worlds.run(2, migration_cases.moved_as_it_infers)


def test_a_plan_that_two_models_share_stays_as_it_is(worlds):
    worlds.run(2, migration_cases.two_models_of_a_plan)


def test_slots_that_rows_leave_are_used_again(worlds):
    for sizes, planned in worlds.run(3, migration_cases.there_and_back):
        assert max(sizes) < 1.3 * planned, sizes  # of some fifty rows each
        assert max(sizes[3:]) <= max(sizes[:3]) + 5


def test_a_rank_that_dies_on_the_way_is_named(worlds):
    *told, _ = worlds.run(3, migration_cases.dies_on_the_way, lost=(2,))
    for text in told:
        assert "rank 2" in text


def test_ranks_that_do_not_come_to_move_rows_are_named(worlds):
    told = worlds.run(3, migration_cases.does_not_come, new_group=True)
    for text in told:  # all wait, and each error says for what
        assert "all ranks wait, and not for the same" in text
        assert "rank 0 for others to mark its replicas" in text
        assert "rank 1 for others to move rows" in text


def test_from_a_monitors_counts_to_the_plan_that_it_judges(worlds, tmp_path):
    worlds.run(2, migration_cases.watched_and_moved, str(tmp_path / "plan-new"))
