"""Sharding a model where a rank fails or dies before it: the others are told, and do not wait."""

import signal
from typing import Any

import pytest

from oper.base.errors import OperError
from tests.support.runtime import mortal_ranks


def _shard(rank: int, group: Any, loses: str) -> None:
    from torchrec.distributed.types import ShardingEnv

    import oper
    from oper.tables.table import tables_of
    from tests.support.runtime.runtime_plans import random_plan
    from tests.support.torchrec.models import Model

    model = Model("meta")
    tables = tables_of(model)
    if rank == 1:
        if loses == "dies":
            mortal_ranks.lose_this_process(signal.SIGKILL)
        tables = tuple(table for table in tables if table.name != "tiny")
    plan = random_plan(0, tables, 2)
    oper.shard(model, plan, env=ShardingEnv.from_process_group(group))


ENDINGS = {
    "fails": "rank 1 failed: table 'tiny': the plan has no such table",
    "dies": "rank 1 died while rank 0 waited for it to come to shard the model",
}


@pytest.mark.parametrize("loses", ENDINGS)
def test_the_others_are_told(loses: str) -> None:
    outcomes = mortal_ranks.run(2, _shard, loses, silent=[1] if loses == "dies" else [])
    assert isinstance(outcomes[0], OperError)
    assert str(outcomes[0]).startswith(ENDINGS[loses])
    if loses == "fails":
        assert str(outcomes[1]).startswith(ENDINGS[loses].removeprefix("rank 1 failed: "))
