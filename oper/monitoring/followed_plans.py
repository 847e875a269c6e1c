"""Actions of a monitor if a plan no longer fits: nothing, a new plan, or its migration.

In: the running plan, the counts and the judgement. Out: plans in a folder, and a model whose rows
follow them. A plan is made if the judgement says that the moves of `oper.replan` pay, on counts
that neither plan was made from (oper/planner/replan/judge.py).

Rank 0 makes a plan in its thread, and the ranks hear of it in `step`, which they call together
between iterations: in one of `every` calls they ask, in a message of a few bytes.
"""

import logging
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from torch import nn

from oper.base.defaults import HORIZON
from oper.base.errors import OperError
from oper.base.formatting import plural
from oper.monitoring.gather_counts import MonitoredRanks
from oper.monitoring.period_report import Moving
from oper.plan.plan import Plan
from oper.planner.replan.judgement import Judgement
from oper.planner.replan.replan import plan_again, with_figures
from oper.profiling.profile import Profile
from oper.torchrec.migration import Migration, migrate

LOG = logging.getLogger("oper.monitor")  # a public name: docs/monitor.md

Policy = Literal["report", "propose", "migrate"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_NONE = -1  # no period's plan


class FollowedPlans:
    """The plans that a monitor makes, on one rank."""

    def __init__(self, policy: Policy, folder: Path | str | None) -> None:
        """Raise OperError if the policy is unknown, or has no folder for its plans."""
        if policy not in POLICIES:
            raise OperError(
                f"policy: expected one of {', '.join(POLICIES)}, got {str(policy)[:40]!r}"
            )
        if policy != "report" and folder is None:
            raise OperError(
                f"policy {policy!r} writes plans; say where, in a folder that all ranks read, "
                "such as plans='plans'"
            )
        self.policy, self._folder = policy, None if folder is None else Path(folder)
        self.migration: Migration | None = None
        self._calls = 0
        self._proposed = _NONE  # on rank 0: the period of a plan that the ranks do not know yet
        self._period = _NONE  # of the plan that rows move to

    def moving(self) -> Moving | None:
        """Return the progress of a migration that goes on or begins soon, during which the running
        plan is not judged; None without one."""
        if (migration := self.migration) is not None:
            return Moving(str(self._folder_of(self._period)), migration.steps_made, migration.steps)
        if self.policy == "migrate" and self._proposed != _NONE:
            return Moving(str(self._folder_of(self._proposed)))
        return None

    def made(self, plan: Plan, counts: Profile, judgement: Judgement, period: int) -> str:
        """Make a new plan for the counts if the policy wants one and moves pay, and return its
        folder, or "": with the policy to migrate the ranks hear of it. Runs in the thread of rank
        0."""
        if self.policy == "report" or not judgement.pays(judgement.replan):
            return ""
        made = plan_again(plan, counts, horizon=HORIZON)
        if not made.moves.changed_rows:
            return ""
        folder = self._folder_of(period)
        try:
            with_figures(made, counts).save(folder, overwrite=True)
        except OperError as error:
            LOG.error("no new plan: %s", error)
            return ""
        self._proposed = period
        return str(folder)

    def _folder_of(self, period: int) -> Path:
        """Return the folder of the plan that is made in a period."""
        assert self._folder is not None
        return self._folder / f"period-{period}"

    def step(self, model: nn.Module, ranks: MonitoredRanks, every: int) -> Plan | None:
        """Ask for a plan in one of `every` calls, or move rows; return the plan whose rows are now
        all in place, if any. Call it on all ranks."""
        if self.policy != "migrate":
            return None
        if self.migration is not None:
            return None if self.migration.step() else self._arrived(ranks)
        self._calls += 1
        if self._calls % every:
            return None
        message = np.int64(self._proposed).tobytes()
        period = int(np.frombuffer(ranks.gather(message, "tell of a new plan")[0], np.int64)[0])
        if period == _NONE:
            return None
        self._period = period
        try:
            self.migration = migrate(model, self._folder_of(period))
        except OperError as error:
            self.policy = "propose"
            LOG.error("no migrations: %s", error)
            return None
        finally:
            self._proposed = _NONE  # not before: rank 0 makes no other plan until then
        if ranks.rank == 0:
            steps = plural(self.migration.steps, "step")
            LOG.info("rows move to %s, in %s", self._folder_of(period), steps)
        return self._arrived(ranks) if self.migration.done else None

    def _arrived(self, ranks: MonitoredRanks) -> Plan:
        """Finish the migration, all of whose rows have moved, and return its plan."""
        assert self.migration is not None
        plan, self.migration = self.migration.plan, None
        if ranks.rank == 0:
            LOG.info("rows are where the new plan has them")
        return plan
