"""Models that are monitored while they train: what their ranks return."""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv

import oper
from oper.base.errors import OperError
from oper.logs import read
from oper.monitoring.period_report import PeriodReport
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import tables_of
from oper.torchrec.sharded_model import sharded_collections
from tests.support.runtime.traffic_cases import BATCH
from tests.support.torchrec.models import Model, batch, plan_tables
from tests.support.torchrec.ranks import all_optimizers, put_optimizer, train_step


def planned(group: dist.ProcessGroup) -> Any:
    """A model of three collections, sharded by a plan of the planner's."""
    model = Model("cpu")
    put_optimizer(model, "sgd")
    plan = plan_tables(tables_of(model), dist.get_world_size(group))
    return oper.shard(model, plan, env=ShardingEnv.from_process_group(group))


def seeds(rank: int, steps: int) -> list[int]:
    """Of the batches that a rank trains on."""
    return [1000 * rank + step for step in range(steps)]


def trained(
    rank: int,
    group: dist.ProcessGroup,
    steps: int,
    pipeline: str | None = None,
    monitored: bool = True,
    **options: Any,
) -> tuple[Profile | None, list[float]]:
    """What a monitor counted in so many steps, and the sums of their outputs."""
    model = planned(group)
    optimizer = all_optimizers(model)
    batches = [batch(seed) for seed in seeds(rank, steps)]
    monitor = oper.monitor(model, **options) if monitored else None
    if pipeline is None:
        outputs = [float(train_step(model, optimizer, b).sum()) for b in batches]
    else:
        made = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"))
        left = iter(batches)
        outputs = [float(made.progress(left).detach().sum()) for _ in batches]
    profile = None
    if monitor is not None:
        profile = monitor.profile()
        monitor.close()
        if pipeline is None:
            train_step(model, optimizer, batches[0])  # no longer watched
    return profile, outputs


class Scalars:
    """A SummaryWriter that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.given.append((tag, scalar_value, global_step))


def one_collection(
    plan: Plan, group: dist.ProcessGroup, nodes: Sequence[int] | None = None, **options: Any
) -> Any:
    """A model of a plan's tables, in one collection, sharded by the plan."""
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=list(t.columns)
        )
        for t in plan.tables
    ]
    module = nn.ModuleList([EmbeddingBagCollection(configs, device=torch.device("meta"))])
    return oper.shard(
        module, plan, env=ShardingEnv.from_process_group(group), nodes=nodes, **options
    )


def counted_log(
    rank: int, group: dist.ProcessGroup, log: Path, folder: Path
) -> PeriodReport | None:
    """The report of a period in which the ranks read their parts of a log's batches, on the nodes
    of the plan."""
    plan = Plan.load(folder)
    model = one_collection(plan, group, plan.topology.node_of)
    with oper.monitor(model, sample_every=4, period=None) as monitor:
        for number, part in enumerate(read(log, plan.tables, batch_size=BATCH // plan.ranks)):
            if number % plan.ranks == rank:
                model.module[0](part.to_kjt()).values().sum().backward()
        return monitor.report()


def drifting(
    rank: int, group: dist.ProcessGroup, folder: Path, jsonl: Path, changes: bool
) -> tuple[list[PeriodReport], Profile | None, Any]:
    """The reports of periods of 20 iterations, all counted. From the third on, if `changes`, other
    rows are read; and what was written of them, to a file, a log and a dashboard."""
    plan, scalars = Plan.load(folder), Scalars()
    model = one_collection(plan, group)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("oper.monitor")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    random = np.random.default_rng(rank)
    reports = []
    options: dict[str, Any] = {"period": None, "sample_every": 1, "jsonl": jsonl}
    with oper.monitor(model, writer=scalars, **options) as monitor:
        for period in range(5):
            for _ in range(20):
                ids = _ids(random, plan, moved=changes and period >= 2)
                model.module[0](ids).values().sum().backward()
            reports.append(monitor.report())
        profile = monitor.profile()
    log.removeHandler(handler)
    return [r for r in reports if r is not None], profile, (said, scalars.given)


def saved_profile(rank: int, group: dist.ProcessGroup, folder: Path, into: Path) -> None:
    """Save what a monitor counts of a model of the plan in a folder, and a plan made from it."""
    plan = Plan.load(folder)
    model, random = one_collection(plan, group), np.random.default_rng(rank)
    with oper.monitor(model, sample_every=1, period=None) as monitor:
        for _ in range(20):
            model.module[0](_ids(random, plan, moved=False)).values().sum().backward()
        profile = monitor.profile()
    if profile is not None:
        profile.save(into / "profile")
        oper.make_plan(profile, plan.topology, plan.workload).save(into / "plan")


def followed(
    rank: int, group: dist.ProcessGroup, folder: Path, plans: Path, policy: str, **options: Any
) -> tuple[list[PeriodReport], list[float], int, str]:
    """The reports of a model that reads other rows from the third period on, the sums of its
    outputs, how many of its iterations ended while rows were on their way, and the digest of the
    plan that it has then."""
    plan = Plan.load(folder)
    model = one_collection(plan, group, **options)
    random = np.random.default_rng(rank)
    reports, outputs, moving = [], [], 0
    how: dict[str, Any] = {"period": None, "sample_every": 1, "policy": policy, "plans": plans}
    with oper.monitor(model, **how) as monitor:
        for period in range(5):
            for _ in range(20):
                read = model.module[0](_ids(random, plan, moved=period >= 2)).values()
                read.square().sum().backward()
                outputs.append(float(read.detach().double().sum()))
                moving += monitor.step()
            reports.append(monitor.report())
        while monitor.step():  # to the plan of the last period
            pass
        followed = monitor.plan
    engine = next(iter(sharded_collections(model).values())).engine
    assert engine.plan.profile == followed.profile
    return [r for r in reports if r is not None], outputs, moving, followed.profile


def follows_nothing(rank: int, group: dist.ProcessGroup, folder: Path, plans: Path) -> list[str]:
    """What is said where rows cannot move: the new plan is gone when the ranks are to read it."""
    plan = Plan.load(folder)
    model = one_collection(plan, group)
    random, said = np.random.default_rng(rank), []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper.monitor").addHandler(handler)
    options: dict[str, Any] = {"period": None, "sample_every": 1, "policy": "migrate"}
    with oper.monitor(model, plans=plans, **options) as monitor:
        for period in range(3):
            for _ in range(20):
                read = model.module[0](_ids(random, plan, moved=period >= 1)).values()
                read.square().sum().backward()
            monitor.report()
            if rank == 0:
                shutil.rmtree(plans, ignore_errors=True)
            dist.barrier(group)
            monitor.step()
    logging.getLogger("oper.monitor").removeHandler(handler)
    return said


def _ids(random: np.random.Generator, plan: Plan, moved: bool) -> KeyedJaggedTensor:
    """A rank's 256 samples, of one id a table, by Zipf's law."""
    ids = [(random.zipf(1.3, 256) - 1) % table.rows for table in plan.tables]
    if moved:
        ids = [table.rows - 1 - i for i, table in zip(ids, plan.tables, strict=True)]
    values = torch.from_numpy(np.concatenate(ids))
    names = [table.columns[0] for table in plan.tables]
    return KeyedJaggedTensor(names, values, lengths=torch.ones(len(values), dtype=torch.int32))


def in_passing(
    rank: int, group: dist.ProcessGroup, jsonl: Path, steps: int = 16, fails: bool = False
) -> None:
    """Take steps, in periods of five that end in steps or with the job, which may fail."""
    model = planned(group)
    optimizer = all_optimizers(model)
    with (
        contextlib.suppress(ZeroDivisionError),
        oper.monitor(model, sample_every=2, period=5, jsonl=jsonl) as monitor,
    ):
        for seed in seeds(rank, steps):
            train_step(model, optimizer, batch(seed))
        if fails:
            raise ZeroDivisionError
    monitor.close()  # again, which does nothing


def one_does_not_close(rank: int, group: dist.ProcessGroup) -> str:
    """Return what is logged where one rank alone closes its monitor at the end of a period."""
    model = planned(group)
    optimizer = all_optimizers(model)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper.monitor").addHandler(handler)
    monitor = oper.monitor(model, period=2, sample_every=2, deadline_seconds=1.0)
    for seed in seeds(rank, 2):
        train_step(model, optimizer, batch(seed))
    if rank == 0:
        monitor.close()
    dist.barrier(group)
    if rank == 1:
        monitor._period = None  # which its script would have to end
        monitor.close()
    logging.getLogger("oper.monitor").removeHandler(handler)
    return "\n".join(said)


def one_does_not_come(rank: int, group: dist.ProcessGroup) -> str:
    """A period ends on one rank alone, in a step: the error that is logged, and training goes on;
    then a rank asks for a report alone."""
    model = planned(group)
    optimizer = all_optimizers(model)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper.monitor").addHandler(handler)
    with oper.monitor(model, period=2, sample_every=2, deadline_seconds=1.0) as monitor:
        if rank == 1:
            monitor._period = None  # as if its script had another number of iterations
        for seed in seeds(rank, 4):
            train_step(model, optimizer, batch(seed))
    logging.getLogger("oper.monitor").removeHandler(handler)
    return "\n".join(said)


def closed(model: Any) -> Any:
    """A monitor that is no longer open."""
    with oper.monitor(model) as monitor:
        return monitor


def refused(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """What a monitor refuses: each error's message."""
    model = planned(group)
    calls: list[Any] = [
        lambda: oper.monitor(nn.Linear(1, 1)),
        lambda: oper.monitor(3),  # type: ignore[arg-type]
        lambda: oper.monitor(model, Plan.load(folder)),
        lambda: oper.monitor(model, sample_every=0),
        lambda: oper.monitor(model, period=0),
        lambda: oper.monitor(model, period=10 + rank, sample_every=10),
        lambda: oper.monitor(model, period=10),
        lambda: oper.monitor(model, policy="move", plans="plans"),  # type: ignore[arg-type]
        lambda: oper.monitor(model, policy="propose"),
        lambda: oper.monitor(model, policy="migrate" if rank else "propose", plans="plans"),
        lambda: oper.monitor(model, jsonl=folder / "none" / "run.jsonl"),
        lambda: oper.monitor(model, jsonl=3),  # type: ignore[arg-type]
        lambda: oper.monitor(model, period=0 if rank else 500),
        lambda: oper.monitor(model, deadline_seconds=-1 if rank else 5),
        lambda: oper.monitor(model, writer=3),  # type: ignore[arg-type]
        lambda: oper.monitor(model, sample_every=1 << 63),
        lambda: oper.monitor(model).profile(),
        lambda: closed(model).report(),
    ]
    found = []
    for call in calls:
        try:
            call()
        except OperError as error:
            found.append(str(error))
        else:
            found.append("")
    return found
