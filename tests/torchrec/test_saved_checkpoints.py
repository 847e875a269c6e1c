"""`oper.save` and `oper.load`: what is saved is loaded bit for bit, on any ranks, by torch too; and
what is damaged or of another model is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrec.modules.embedding_configs import DataType

from oper.checkpoint.marker import Marker
from oper.checkpoint.verify import verify
from oper.scheduler.cache_settings import CacheSettings
from tests.support.runtime import mortal_ranks
from tests.support.torchrec import saved_cases as cases
from tests.support.torchrec.ranks import compare


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam", "partial_rowwise_adam"])
def test_a_model_goes_on_from_a_checkpoint_bit_for_bit(worlds, tmp_path, kind):
    saved = worlds.run(2, cases.saved, kind, tmp_path / "made")[0]
    loaded = worlds.run(2, cases.loaded, kind, tmp_path / "made")[0]
    compare(loaded, saved, 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_goes_to_other_numbers_of_ranks(worlds, tmp_path, ranks):
    saved = worlds.run(2, cases.saved, "adam", tmp_path / "made")[0]
    loaded = worlds.run(ranks, cases.loaded, "adam", tmp_path / "made")[0]
    now = {key for key in saved if not key.startswith("after ")}
    compare({key: loaded[key] for key in now}, {key: saved[key] for key in now}, 0)
    compare(loaded, saved, 1e-5)  # sums of gradients are in another order


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_narrow_tables_are_saved_as_such(worlds, tmp_path, data_type):
    saved = worlds.run(2, cases.saved, "adagrad", tmp_path / "made", data_type)[0]
    loaded = worlds.run(2, cases.loaded, "adagrad", tmp_path / "made", data_type)[0]
    compare(loaded, saved, 0)


def test_tables_of_the_tier_are_saved_with_what_the_caches_hold(worlds, tmp_path):
    cache = CacheSettings(size="60%")
    saved = worlds.run(2, cases.saved, "adagrad", tmp_path / "made", DataType.FP32, cache)[0]
    loaded = worlds.run(2, cases.loaded, "adagrad", tmp_path / "made", DataType.FP32, cache)[0]
    compare(loaded, saved, 0)


def test_ranks_that_share_no_memory_save_and_load(worlds, tmp_path):
    saved = worlds.run(2, cases.saved, "adagrad", tmp_path / "made", nodes=(0, 1))[0]
    loaded = worlds.run(2, cases.loaded, "adagrad", tmp_path / "made", nodes=(0, 1))[0]
    compare(loaded, saved, 0)


def test_a_trained_model_is_loaded_to_serve(worlds, tmp_path):
    saved = worlds.run(2, cases.saved, "adam", tmp_path / "made")[0]
    found = worlds.run(3, cases.loaded_to_serve, tmp_path / "made")[0]
    compare(found, {k: v for k, v in saved.items() if "/" not in k and "after" not in k}, 0)


@pytest.mark.slow
def test_saving_and_loading_take_little_memory(worlds, tmp_path):
    worlds.run(2, cases.little_memory, tmp_path / "made")


@pytest.mark.parametrize("sharding", ["none", "row_wise", "table_wise"])
def test_torch_reads_it_into_its_own_modules(worlds, tmp_path, sharding):
    kind = "rowwise_adagrad"
    saved = worlds.run(2, cases.saved, kind, tmp_path / "made")[0]
    found = worlds.run(2, cases.read_by_torch, kind, sharding, tmp_path / "made")[0]
    expected = {key: value for key, value in saved.items() if not key.startswith("after ")}
    if sharding == "none":
        expected = {key: value for key, value in expected.items() if "/" not in key}
    compare(found, expected, 0)


def test_torchs_asynchronous_saves_have_the_tables_of_their_begin(worlds, tmp_path):
    worlds.run(2, cases.saved_asynchronously, tmp_path / "made")


def test_where_a_rank_cannot_write_all_say_so_and_train_on(worlds, tmp_path):
    (tmp_path / "all").mkdir()
    worlds.run(2, cases.written_by_a_full_disk, tmp_path / "all" / "made")


def test_where_a_rank_dies_in_a_save_the_others_name_it(tmp_path):
    (tmp_path / "all").mkdir()
    folder = tmp_path / "all" / "made"
    found = mortal_ranks.run(2, cases.lost_while_saving, folder)
    assert "rank 1" in str(found[0])
    assert "died" in str(found[0])
    assert Marker.read(folder).step == 1
    assert verify(folder).ok
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("saves", [True, False])
def test_a_rank_that_dies_as_it_comes_is_named(tmp_path, saves):
    found = mortal_ranks.run(2, cases.lost_unheard, tmp_path / "made", saves)
    assert str(found[0]).startswith("rank 1 died while rank 0 waited for it to come to save or")


@pytest.mark.parametrize("nodes", [None, (0, 1, 1), (0, 0, 1)])
@pytest.mark.parametrize("where", ["save", "write", "save_delta", "load"])
def test_a_rank_that_stops_is_named_at_the_deadline(tmp_path, where, nodes):
    outcomes = mortal_ranks.run(3, cases.late, tmp_path / "run", where, nodes, silent=[2])
    for text, seconds in outcomes[:2]:
        assert text.startswith("rank 2 did not come within 3 s, while rank ")
        assert 2 < seconds < 60  # the process group's timeout is 300 s here


def test_nothing_is_replaced_unasked_and_the_newest_is_loaded(worlds, tmp_path):
    worlds.run(2, cases.replaced, tmp_path / "made")


def test_tables_that_grew_keep_the_initial_values_of_their_new_rows(worlds, tmp_path):
    worlds.run(2, cases.grown, tmp_path / "made")


def test_checkpoints_of_other_tables_are_refused(worlds, tmp_path):
    worlds.run(2, cases.refused, tmp_path / "made")


def test_what_one_rank_gives_wrongly_is_told_to_all(worlds, tmp_path):
    worlds.run(2, cases.mistaken_alone, tmp_path / "made")


def removed(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def cut(folder: Path) -> None:
    content = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(content[:-1])


def turned(folder: Path) -> None:
    """A bit of a value of a row, which no size and no index tells."""
    file = folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(b"data/0") + 100] ^= 1
    file.write_bytes(content)


def older(folder: Path) -> None:
    marker = folder / "checkpoint.json"
    marker.write_text(marker.read_text().replace('"version": 1', '"version": 0'))


def edited(folder: Path) -> None:
    marker = folder / "checkpoint.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 5}))


def without_marker(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed, "__1_0.distcp: is missing; the folder is incomplete"),
        (cut, r"__1_0.distcp: \d+ bytes, and \d+ were written; it is truncated"),
        (turned, "its CRC-32 is not the one that was written"),
        (older, "expected version 1, got 0, written by an older oper; save it again by oper.save"),
        (edited, "its SHA-256 is not the one that it states"),
        (without_marker, "torch.distributed.checkpoint wrote it: load it by that"),
    ],
)
def test_damage_is_named(
    worlds, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    worlds.run(2, cases.small_saved, tmp_path / "made")
    damage(tmp_path / "made")
    worlds.run(2, cases.damaged, tmp_path / "made", message)
