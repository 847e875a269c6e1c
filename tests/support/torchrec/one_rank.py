"""Plans, profiles and sharding of models on one rank, without a process group."""

from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan


def plan_of(model: nn.Module, ranks: int = 1) -> Plan:
    return random_plan(0, tables_of(model), ranks)


def parallel(model: nn.Module, **given: Any) -> DistributedModelParallel:
    env = ShardingEnv.from_local(1, 0)
    return DistributedModelParallel(model, env=env, init_data_parallel=False, **given)


def profile_of(model: nn.Module) -> Profile:
    tables = tables_of(model)
    counts = np.ones(sum(table.rows for table in tables), np.uint32)
    return Profile(tables, 100, counts, counts[:0], (False,) * len(tables))
