"""Migration: a model's rows go to where a new plan has them, while it trains or serves.

    migration = oper.migrate(model, "plan-new")
    for batch in loader:
        train(batch)
        migration.step()        # nothing, once it is done

Each step moves some rows of one collection; the collections take their turns (runtime/migration/).
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from oper.base.arrays import Ints
from oper.base.errors import OperError, check_type
from oper.base.formatting import format_bytes
from oper.base.units import whole_number
from oper.plan.plan import Plan
from oper.runtime.migration.row_migration import RowMigration
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.sharding_plan import OperShardingPlan, plan_of

# A step with one of these in it takes at most 1.1 times as long, of tables alone on CPU ranks
# (benchmarks/runtime/migration.py).
BYTES_PER_STEP = 1 << 16


class Migration:
    """Rows of a model on their way to where `plan` has them; made by `migrate`. All ranks take its
    steps together, in one order with the model's."""

    def __init__(self, model: nn.Module, plan: Plan, parts: list[RowMigration]) -> None:
        self._model, self.plan, self._parts = model, plan, parts
        self._tell_model()

    @property
    def steps(self) -> int:
        """The number of steps that the migration takes."""
        return sum(part.schedule.steps for part in self._parts)

    @property
    def steps_made(self) -> int:
        """The number of steps that were taken."""
        return sum(part.steps_made for part in self._parts)

    @property
    def done(self) -> bool:
        """Whether all rows have moved."""
        return all(part.done for part in self._parts)

    @property
    def rows(self) -> int:
        """The number of rows that move, or get or lose copies."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def bytes(self) -> Ints:
        """The bytes of rows and optimizer state that come to each rank from others, [M]."""
        return np.asarray(np.sum([part.bytes for part in self._parts], axis=0))

    @property
    def extra_bytes(self) -> int:
        """The memory that it takes of this rank beside that of the tables as it is: what comes in
        a step, and slots of ranks that come to have more rows."""
        return max((part.extra_bytes for part in self._parts), default=0)

    def step(self) -> bool:
        """Move the rows of the next step; whether there is another.

        To be called on all ranks, between two iterations. A batch that was prepared before, as by a
        pipeline, is prepared again when it is used. OperError on all ranks, in which the model can
        no longer be used, where one of them does not come within the deadline or dies; and on each
        that calls it while gradients are held back (`oper.accumulate`).
        """
        for part in self._parts:
            if not part.done:
                part.step()
                self._tell_model()
                return not self.done
        return False

    def _tell_model(self) -> None:
        """DistributedModelParallel keeps the plan by which a model was sharded. It gets one of its
        own: by the one that it was given there may be others."""
        model: Any = self._model
        of_model = getattr(model, "plan", None)
        if self.done and isinstance(of_model, OperShardingPlan):
            model._plan = OperShardingPlan(of_model.plan, self.plan)

    def finish(self) -> None:
        """Take all steps that are left."""
        while self.step():
            pass

    def __repr__(self) -> str:
        return (
            f"<Migration of {self.rows:,} rows, {format_bytes(int(self.bytes.sum()))}: "
            f"{self.steps_made} of {self.steps} steps>"
        )


def migrate(
    model: nn.Module, plan: Plan | Path | str, *, bytes_per_step: int = BYTES_PER_STEP
) -> Migration:
    """Move the rows of a sharded model to where a new plan has them, by steps that the training
    loop takes. To be called on all ranks, with the same plan.

    Rows whose ranks are the same in both plans stay. The new plan is best one of `oper replan`,
    which lets most of them stay, but any for the model's tables and ranks will do. A plan that
    rows are on their way to already gives what moves them again.

    Args:
        bytes_per_step: the most bytes of rows and optimizer state that a rank copies in a step,
            from others or between slots of its own, unless a single row has more.

    Raises:
        OperError: on all ranks, where the plan is for other tables, ranks, mode or fetches or has
            other tables in the tier, where rows are read by NVSHMEM, where memory does not suffice,
            and where a migration to another plan is not done. Nothing has changed then.
    """
    check_type("migrate", "model", model, nn.Module)
    collections: dict[str, Any] = sharded_collections(model)
    problem = ""
    try:
        most = whole_number(bytes_per_step, "bytes_per_step")
        if most < 1:
            raise OperError(f"bytes_per_step: expected at least 1, got {most}")
        wanted = plan_of(plan)
    except OperError as error:  # as of a folder that one rank alone does not see
        problem = str(error)
    next(iter(collections.values())).engine.node.check_all(problem, "read the plan to migrate to")
    return Migration(model, wanted, [c.engine.migrate(wanted, most) for c in collections.values()])
