"""Models that are watched while they run, sharded in several ways: what their ranks return is
compared with a profile of the batches themselves."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import train_pipelines

import oper
from oper.profiling.profile import Profile
from oper.profiling.recorder import Recorder
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


def recorded_twice(rank: int, group: dist.ProcessGroup, first: int) -> list[Profile]:
    """What two recorders of a model counted in a pipeline, of which one, the `first` or the second
    that began, ended after two steps; that one's first."""
    model, _ = sharded(group)
    batches = [batch(10 * rank + step) for step in range(STEPS)]
    recorders = [Recorder(model), Recorder(model)]
    watching = [recorder.watch() for recorder in recorders]
    with torch.no_grad():
        for number, inputs in enumerate(batches):
            if number == 2:
                watching[first].close()
            # As pipelines do, which skip the forward of a collection.
            for collection, ids in (
                (model.module.bags, inputs.ids),
                (model.module.weighted, inputs.weighted_ids),
                (model.module.sequences, inputs.ids),
            ):
                collection.is_pipelined = True
                collection.input_dist(collection.create_context(), ids)
    watching[1 - first].close()
    for collection in (model.module.bags, model.module.weighted, model.module.sequences):
        assert "input_dist" not in vars(collection)
    return [recorders[first].profile(), recorders[1 - first].profile()]
