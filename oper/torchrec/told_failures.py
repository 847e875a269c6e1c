"""Failures of a rank before its engine exists: the other ranks, which wait for it, are told."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchrec.distributed.types import ShardingEnv

from oper.runtime.comm.group import Group


@contextmanager
def telling_others(env: ShardingEnv, deadline_seconds: float) -> Iterator[None]:
    """Make the other ranks raise an error for a failure inside: they reach the engine's first
    collective, and this rank does not."""
    try:
        yield
    except BaseException as error:
        if env.process_group is not None and env.world_size > 1:
            Group(env.process_group, deadline_seconds).fail(error)
        raise


@contextmanager
def all_ranks(env: ShardingEnv, deadline_seconds: float) -> Iterator[None]:
    """Wait at the end for all ranks, and raise an error if one has failed inside:
    DistributedModelParallel begins with a broadcast that has no deadline."""
    if env.process_group is None or env.world_size == 1:
        yield
        return
    group = Group(env.process_group, deadline_seconds)
    try:
        yield
    except BaseException as error:
        group.fail(error)
        raise
    group.gather(b"1", "come to shard the model")
