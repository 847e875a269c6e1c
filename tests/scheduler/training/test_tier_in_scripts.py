"""TorchRec scripts whose tables are in the tier and cached, against the unsharded model."""

import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import oper
from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings
from tests.support.runtime import mortal_ranks
from tests.support.runtime.ranks import RankFailedError
from tests.support.torchrec import checkpoint_cases as checkpoints
from tests.support.torchrec import training_cases as cases
from tests.support.torchrec.ranks import compare

ALL = CacheSettings("100%")


@pytest.mark.parametrize("sync", ["bsp", "on-demand", "peer", "het-exact:0"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_script_trains_as_the_unsharded_model(worlds, sync, ranks):
    kind = "sgd" if sync.startswith("het") else "adam"
    cache = CacheSettings("100%", sync)
    moved = worlds.run(ranks, cases.train_and_compare, kind, 0.0, cache=cache)
    assert min(moved) > 1e-3


@pytest.mark.parametrize("name", ["TrainPipelineBase", "TrainPipelineSparseDist"])
def test_pipelines(worlds, name):
    worlds.run(2, cases.pipelined, name, cache=ALL)


@pytest.mark.parametrize("dense", [False, True])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(worlds, tmp_path, dense):
    worlds.run(2, checkpoints.resumed, tmp_path / "saved", dense, ALL)


def test_a_checkpoint_is_that_of_a_plan_without_a_tier(worlds, tmp_path):
    given = ("oper", "adagrad", None, tmp_path / "saved")
    saved = worlds.run(2, checkpoints.checkpoint, *given, cache=ALL)
    loaded = worlds.run(1, checkpoints.checkpoint, *given[:2], tmp_path / "saved")[0]
    assert set(saved[0]) == set(loaded)
    compare(loaded, saved[0], 1e-5)


def test_a_cache_is_for_plans_with_a_tier(worlds):
    with pytest.raises(RankFailedError, match="cache: the plan has no tables in the tier"):
        worlds.run(2, _shard_without_a_tier)


def test_a_cache_is_given_by_its_settings():
    with pytest.raises(OperError, match=r"cache: expected oper\.CacheSettings, got a str"):
        oper.OperEmbeddingBagCollectionSharder(cache="10%")  # type: ignore[arg-type]


def _shard_without_a_tier(rank: int, group: Any) -> None:
    from torchrec.distributed.types import ShardingEnv

    from oper.tables.table import tables_of
    from tests.support.runtime.runtime_plans import random_plan
    from tests.support.torchrec.models import Model

    model = Model("meta")
    env = ShardingEnv.from_process_group(group)
    oper.shard(model, random_plan(0, tables_of(model), 2), env=env, cache=ALL)


def test_rows_of_the_tier_are_not_rounded_at_random(worlds):
    said = "stochastic_rounding: tables of the tier in bf16"
    with pytest.raises(RankFailedError, match=said):
        worlds.run(2, _shard_rounded_at_random, "BF16")
    worlds.run(2, _shard_rounded_at_random, "FP32")  # which are not rounded


def _shard_rounded_at_random(rank: int, group: Any, data_type: str) -> None:
    from torchrec.modules.embedding_configs import DataType

    from tests.support.torchrec.ranks import sharded

    fused = {"stochastic_rounding": True}
    sharded(group, "sgd", data_type=DataType[data_type], cache=ALL, fused_params=fused)


@pytest.mark.parametrize("other", [{"size": "50%"}, {"sync": "bsp"}, {"evict": "lfu"}])
def test_ranks_with_unlike_caches_find_it_at_the_start(worlds, other):
    with pytest.raises(RankFailedError, match="the settings of caches: expected the same on all"):
        worlds.run(2, _shard_with_unlike_caches, other)


def _shard_with_unlike_caches(rank: int, group: Any, other: dict[str, str]) -> None:
    from tests.support.torchrec.ranks import sharded

    sharded(group, "sgd", cache=CacheSettings(**other) if rank else CacheSettings())


@pytest.mark.parametrize("action", ["push rows", "send rows", "say what rows its batch reads"])
def test_a_rank_that_dies_while_it_sends_is_named(tmp_path, action):
    outcomes = mortal_ranks.run(2, _die_in, action, tmp_path / "saved", silent=[1])
    assert isinstance(outcomes[0], OperError)
    assert str(outcomes[0]).startswith("rank 1 died while rank 0 waited for it to")
    # What was saved before is whole.
    found = mortal_ranks.run(2, _go_on, tmp_path / "saved")
    assert found == [True, True]


def _trained(group: Any) -> tuple[Any, Any]:
    from tests.support.torchrec.ranks import sharded

    return sharded(group, "adam", cache=ALL, deadline_seconds=15.0)


def _die_in(rank: int, group: Any, action: str, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    from oper.runtime.comm.exchange import _Outboxes
    from tests.support.torchrec.checkpoint_cases import _state
    from tests.support.torchrec.models import batch
    from tests.support.torchrec.ranks import train_step

    model, optimizer = _trained(group)
    train_step(model, optimizer, batch(rank))
    save(_state(model, "adam"), checkpoint_id=folder, process_group=group)
    train_step(model, optimizer, batch(10 + rank))
    write = _Outboxes._write

    def write_and_die(self: Any, parts: Any, given: str) -> None:
        write(self, parts, given)
        if rank == 1 and given == action:
            mortal_ranks.lose_this_process(signal.SIGKILL)

    patch.object(_Outboxes, "_write", write_and_die).start()
    for step in range(2, 6):
        train_step(model, optimizer, batch(10 * step + rank))


def _go_on(rank: int, group: Any, folder: Path) -> bool:
    from tests.support.torchrec.checkpoint_cases import _load
    from tests.support.torchrec.models import batch
    from tests.support.torchrec.ranks import train_step

    model, optimizer = _trained(group)
    _load(model, "adam", folder, group)
    train_step(model, optimizer, batch(rank))
    return True
