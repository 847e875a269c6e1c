"""Migration of a model's rows to their places in a new plan, while it trains or serves.

    migration = oper.migrate(model, "plan-new")
    for batch in loader:
        train(batch)
        migration.step()        # does nothing once all rows have moved

Each step moves some rows of one collection, in turn (runtime/migration/).
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

# A training step with one of these takes at most 1.1 times as long, for tables alone on CPU ranks
# (benchmarks/runtime/migration.py).
BYTES_PER_STEP = 1 << 16


class Migration:
    """Move of a model's rows to their places in `plan`; made by `migrate`. All ranks take its steps
    together, in one order with the model's."""

    def __init__(self, model: nn.Module, plan: Plan, parts: list[RowMigration]) -> None:
        self._model, self.plan, self._parts = model, plan, parts
        self._tell_model()

    @property
    def steps(self) -> int:
        """Number of steps that the migration takes."""
        return sum(part.schedule.steps for part in self._parts)

    @property
    def steps_made(self) -> int:
        """Number of steps taken so far."""
        return sum(part.steps_made for part in self._parts)

    @property
    def done(self) -> bool:
        """True if all rows have moved."""
        return all(part.done for part in self._parts)

    @property
    def rows(self) -> int:
        """Number of rows that move, or gain or lose copies."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def bytes(self) -> Ints:
        """Bytes of rows and optimizer state that each rank receives from others, [M]."""
        return np.asarray(np.sum([part.bytes for part in self._parts], axis=0))

    @property
    def extra_bytes(self) -> int:
        """Bytes of this rank's memory that the migration takes in addition to the present tables:
        buffers of a step, and slots of ranks that gain rows."""
        return max((part.extra_bytes for part in self._parts), default=0)

    def step(self) -> bool:
        """Move the rows of the next step; return whether there is another.

        Call it on all ranks, between two iterations. A batch that was prepared before, for example
        by a pipeline, is prepared again when it is used. Raise OperError on all ranks, after which
        the model is unusable, if one of them dies or misses the deadline; and on each rank that
        calls it while gradients are held back (`oper.accumulate`).
        """
        for part in self._parts:
            if not part.done:
                part.step()
                self._tell_model()
                return not self.done
        return False

    def _tell_model(self) -> None:
        """Give DistributedModelParallel, which keeps the plan by which a model was sharded, a new
        plan object: other models may share the old one."""
        model: Any = self._model
        of_model = getattr(model, "plan", None)
        if self.done and isinstance(of_model, OperShardingPlan):
            model._plan = OperShardingPlan(of_model.plan, self.plan)

    def finish(self) -> None:
        """Take all remaining steps."""
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
    """Move the rows of a sharded model to their places in a new plan, in steps that the training
    loop takes. Call it on all ranks, with the same plan.

    Rows whose ranks are equal in both plans stay. The new plan is best made by `oper replan`, with
    which most rows stay, but may be any plan for the model's tables and ranks. For a plan to which
    rows are moving already, the result continues that migration.

    Args:
        bytes_per_step: the most bytes of rows and optimizer state that a rank copies in a step,
            from others or between its own slots, unless a single row has more.

    Raises:
        OperError: on all ranks, with the model unchanged, if the plan is for other tables, ranks,
            mode or fetches or has other tables in the tier, if rows are read by NVSHMEM, if memory
            does not suffice, or if a migration to another plan is unfinished.
    """
    check_type("migrate", "model", model, nn.Module)
    collections: dict[str, Any] = sharded_collections(model)
    problem = ""
    try:
        most = whole_number(bytes_per_step, "bytes_per_step")
        if most < 1:
            raise OperError(f"bytes_per_step: expected at least 1, got {most}")
        wanted = plan_of(plan)
    except OperError as error:  # for example for a folder that only one rank lacks
        problem = str(error)
    next(iter(collections.values())).engine.node.check_all(problem, "read the plan to migrate to")
    return Migration(model, wanted, [c.engine.migrate(wanted, most) for c in collections.values()])
