"""`oper.save_delta`: a base and its deltas have, bit for bit, what a whole save of the same moment
has; broken chains are refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrec.modules.embedding_configs import DataType

from oper.checkpoint.describe import describe
from oper.checkpoint.reshard import reshard
from oper.checkpoint.shard_file import read_shard_rows
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.verify import verify
from oper.scheduler.cache_settings import CacheSettings
from tests.support.checkpoint.same_checkpoints import assert_same
from tests.support.torchrec import delta_cases as cases
from tests.support.torchrec.models import TABLES
from tests.support.torchrec.ranks import compare

MIXED = {"wide": "adam", "mean": "none", "other": "rowwise_adagrad", "weighted": "sgd"}
KINDS = dict.fromkeys(TABLES, "adagrad") | MIXED


def assert_whole(folder: Path, last: str = "3") -> None:
    """The chain has what the whole save has, as files and when it is resharded; and there is a
    table of which a delta has some rows and not all."""
    assert_same(folder / "run" / last, folder / "whole")
    reshard(folder / "run" / last, folder / "made whole", 3)
    assert open_chain(folder / "made whole").last.delta is None
    assert_same(folder / "made whole", folder / "whole")
    assert verify(folder / "run" / last).ok
    assert verify(folder / "made whole").ok


def assert_small(folder: Path) -> None:
    """A delta has fewer rows than the tables."""
    described = describe(folder)
    assert described.delta is not None
    touched = sum(table.weight.shape[0] for table in described.tables)
    assert 0 < touched < sum(table["rows"] for table in described.delta.tables.values()) / 2


@pytest.mark.parametrize("kind", ["sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_chain_has_the_bits_of_a_whole_save(worlds, tmp_path, kind):
    saved = worlds.run(2, cases.saved_in_links, kind, tmp_path)[0]
    assert_whole(tmp_path)
    assert_small(tmp_path / "run" / "2")
    compare(worlds.run(2, cases.loaded_from_links, kind, tmp_path)[0], saved, 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_chain_goes_to_other_numbers_of_ranks(worlds, tmp_path, ranks):
    saved = worlds.run(2, cases.saved_in_links, "partial_rowwise_adam", tmp_path)[0]
    found = worlds.run(ranks, cases.loaded_from_links, "partial_rowwise_adam", tmp_path)[0]
    compare(found, saved, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"copies": 1.0},
        {"nodes": (0, 1)},
        {"nodes": (0, 1), "fetch": "distinct"},
        {"data_type": DataType.BF16},
        {"cache": CacheSettings(size="60%")},
        {"accumulates": True},
    ],
    ids=["replicas", "nodes", "distinct", "bf16", "tier", "accumulated"],
)
def test_wherever_rows_lie_and_however_they_are_trained(worlds, tmp_path, options):
    worlds.run(2, cases.saved_in_links, "adagrad", tmp_path, **options)
    assert_whole(tmp_path)


def test_updates_of_caches_that_are_some_apart_are_in_it(worlds, tmp_path):
    cache = CacheSettings(size="60%", sync="het:4")
    worlds.run(2, cases.saved_in_links, "sgd", tmp_path, cache=cache)
    assert_whole(tmp_path)


def test_tables_may_have_different_optimizers_and_be_frozen(worlds, tmp_path):
    worlds.run(2, cases.saved_in_links, KINDS, tmp_path)
    assert_whole(tmp_path)
    for link in ("1", "2", "3"):
        assert "mean" not in {table.name for table in describe(tmp_path / "run" / link).tables}


@pytest.mark.parametrize("options", [{}, {"cache": CacheSettings("60%")}], ids=["heap", "tier"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_migrate_between_saves_are_in_it(worlds, tmp_path, ranks, options):
    worlds.run(ranks, cases.saved_in_links, "adam", tmp_path, moves=True, **options)
    assert_whole(tmp_path)
    assert_small(tmp_path / "run" / "2")  # not all that has moved


def test_rows_that_migrate_between_nodes_are_in_it(worlds, tmp_path):
    worlds.run(3, cases.saved_in_links, "adam", tmp_path, moves=True, nodes=(0, 0, 1))
    assert_whole(tmp_path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_that_is_started_again_goes_on_with_deltas(worlds, tmp_path, ranks):
    worlds.run(2, cases.saved_in_links, "adam", tmp_path)
    worlds.run(ranks, cases.gone_on_with, tmp_path)
    for job in range(2):
        assert_same(tmp_path / "run" / f"{job}-2", tmp_path / f"whole-{job}")
        assert len(open_chain(tmp_path / "run" / f"{job}-2").links) == 6


def test_rows_that_state_dicts_change_are_in_it(worlds, tmp_path):
    worlds.run(2, cases.written_otherwise, tmp_path)
    assert_whole(tmp_path)


def test_a_delta_may_have_no_rows(worlds, tmp_path):
    worlds.run(2, cases.nothing_changed, tmp_path)
    assert_whole(tmp_path, "1")
    assert not describe(tmp_path / "run" / "1").tables


def test_rows_that_a_base_lacked_are_in_it(worlds, tmp_path):
    worlds.run(2, cases.grown_between, tmp_path)
    assert_whole(tmp_path, "2")


def test_what_cannot_be_saved_is_refused(worlds, tmp_path):
    worlds.run(2, cases.refused, tmp_path)


def test_a_delta_that_cannot_be_written_loses_nothing(worlds, tmp_path):
    worlds.run(2, cases.failing_disk, tmp_path)
    assert_whole(tmp_path, "2")


def removed(run: Path) -> None:
    shutil.rmtree(run / "1")


def replaced(run: Path) -> None:
    shutil.rmtree(run / "1")
    shutil.copytree(run.parent / "whole", run / "1")


def edited(run: Path) -> None:
    marker = run / "1" / "checkpoint.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 5}))


def cut(run: Path) -> None:
    file = run / "1" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def turned(run: Path) -> None:
    """A bit of a table's rows."""
    tensor = describe(run / "1").tables[0].weight
    shard = tensor.shards[-1]
    values = read_shard_rows(run / "1", tensor, shard, 0, shard.sizes[0])
    file = run / "1" / shard.extent.file
    content = bytearray(file.read_bytes())
    content[content.index(values.numpy().tobytes(), shard.extent.start)] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed, "2: is a delta upon 1, and .*1 holds no checkpoint; put it back there"),
        (replaced, "2: is a delta upon the 1 of SHA-256 .* is another checkpoint now"),
        (edited, "its SHA-256 is not the one that it states"),
        (cut, r"__1_0.distcp: \d+ bytes, and \d+ were written; it is truncated"),
        (turned, "its CRC-32 is not the one that was written"),
    ],
)
def test_a_broken_chain_is_refused_by_name(
    worlds, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    worlds.run(2, cases.saved_in_links, "adam", tmp_path)
    damage(tmp_path / "run")
    worlds.run(2, cases.damaged, tmp_path / "run" / "2", message)
