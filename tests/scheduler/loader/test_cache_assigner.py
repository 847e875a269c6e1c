"""The loader's replay of caches: what it has is what training's caches have."""

import numpy as np
import pytest
import torch

from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.dispatch import Policy
from oper.scheduler.loader.assigners import CachedRowsAssigner
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds
from tests.support.scheduler import dispatched_cases as cases


@pytest.mark.parametrize("policy", ["laia", "esd", "grouped"])
@pytest.mark.parametrize("sync", ["bsp", "on-demand"])
def test_a_cache_is_divided_anew_where_training_divides_it(
    worlds: Worlds, policy: str, sync: str
) -> None:
    for replayed, trained in worlds.run(2, cases.replay, policy, CacheSettings("15%", sync)):
        assert replayed == trained
        a, b = replayed[0]
        # The first batch asks for five times as many rows of a.
        assert a < 2 * b


def assigner_of(size: str) -> CachedRowsAssigner:
    plan = random_plan(4, cases.UNLIKE, 1)
    rows = PlanRows(plan, (0, 1), None)
    policy = Policy.parse("esd")
    return CachedRowsAssigner(rows, (0, 1), policy, CacheSettings(size), np.ones(1), 0)


def message(assigner: CachedRowsAssigner, step: int, asked: tuple[int, int]) -> torch.Tensor:
    return assigner.message(Structure.of(cases.unlike_batch(step, 0, asked)))


def test_a_batch_that_fits_no_division_is_an_error() -> None:
    assigner = assigner_of("9%")
    given = message(assigner, 0, (5, 1))
    assigner.assign([given], cases.SAMPLES, 0)
    with pytest.raises(OperError, match=r"cache '9%': batch 1: worker 0 trains .* bytes would be"):
        assigner.assign([message(assigner, 1, (5, 5))], cases.SAMPLES, 1)
