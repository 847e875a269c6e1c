"""Models that are watched while they run, sharded in several ways: what their ranks return is
compared with a profile of the batches themselves."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import train_pipelines

import oper
from oper.profiling.profile import Profile
from tests.support.torchrec.models import Model, batch
from tests.support.torchrec.ranks import all_optimizers, put_optimizer, sharded, stock, train_step

STEPS = 3


def recorded(rank: int, group: dist.ProcessGroup, how: str, pipeline: str | None) -> Profile:
    """What a rank's recorder counted in STEPS steps."""
    model: Any
    if how == "unsharded":
        model = Model("cpu")
        put_optimizer(model, "sgd")
    elif how == "oper":
        model, _ = sharded(group)
    else:
        model = stock("sgd", how, group)
    batches = [batch(10 * rank + step) for step in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if how == "unsharded" else None
    if optimizer is None:
        optimizer = all_optimizers(model)
    with oper.record(model) as recorder:
        if pipeline is None:
            for inputs in batches:
                train_step(model, optimizer, inputs)
        else:
            made = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"))
            left = iter(batches)
            for _ in batches:
                made.progress(left)
    found = recorder.profile()
    if pipeline is None:
        train_step(model, optimizer, batches[0])  # no longer watched
        assert recorder.profile().samples == found.samples
    return found
