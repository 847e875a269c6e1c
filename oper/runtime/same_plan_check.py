"""What all ranks compare before an engine starts, and the number of ranks that its plan is for.

Ranks compare their inputs before any of them checks its own, so that all raise the same error.
"""

from collections.abc import Sequence

import torch.distributed as dist

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.comm.node import Node
from oper.runtime.memory import replica_addresses
from oper.runtime.tables.optimizer_buckets import EmbeddingTable


def check_agreement(
    node: Node,
    plan: Plan,
    tables: Sequence[EmbeddingTable],
    weighted: bool,
    gradient_scale: float,
) -> None:
    """Check that all ranks have the same plan, tables and settings, that the plan is for them, and
    that it can be trained if it is for training. For all ranks to call; OperError on all of them.
    """
    settings = [(t.index, t.features, t.pooling, t.optimizer) for t in tables]
    given = repr((settings, weighted, gradient_scale)).encode()
    node.agree(replica_addresses.plan_digest(plan), "plan")
    node.agree(given, "tables and optimizers")
    if node.ranks != plan.ranks:
        alone = node.group is None and not dist.is_initialized()
        raise OperError(
            f"the plan is for {plan.ranks} ranks, and {node.ranks} "
            + ("is running without a process group" if alone else "are running")
            + f"; plan for as many (--topology), or start {plan.ranks}"
            + (" and call torch.distributed.init_process_group first" if alone else "")
        )
    if plan.workload.training:
        replica_addresses.check_trainable(plan)
