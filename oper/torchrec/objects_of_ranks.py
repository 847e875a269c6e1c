"""Python objects that ranks tell each other outside of steps, within the process group's timeout.

`group` is None where there is one rank alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from oper.base.errors import OperError, one_line

_T = TypeVar("_T")


def of_first_rank(make: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
    """What rank 0 makes, on all ranks. Where it fails, the others raise an OperError that says the
    same."""
    if group is None:
        return make()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = make()
        except Exception as error:  # Whatever it is, the others must not wait for more.
            named = isinstance(error, OperError)
            failure, box[1] = error, _said(error) if named else f"rank 0 failed: {_said(error)}"
    with lost_as_error():
        dist.broadcast_object_list(box, group=group, group_src=0)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise OperError(box[1])
    return box[0]


def of_each_rank(make: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
    """What each rank makes by itself, before all go on together. Where it fails on one, the others
    raise an OperError that says the same."""
    failure, said = None, ""
    try:
        made = make()
    except Exception as error:  # Whatever it is, the others must not wait for more.
        failure, said = error, _said(error)
    for rank, theirs in enumerate(gathered(said, group)):
        if failure is not None:
            raise failure
        if theirs:
            raise OperError(f"rank {rank} failed: {theirs}")
    return made


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OperError) else repr(error)


@contextmanager
def lost_as_error() -> Iterator[None]:
    """Inside, what torch says of a connection where a rank is lost is an OperError. Nothing but
    torch is to be called inside."""
    try:
        yield
    except RuntimeError as error:
        raise OperError(
            f"the ranks lost each other: {one_line(error)}; see the last output of the others"
        ) from error


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the one that makes what is one for all."""
    return group is None or dist.get_rank(group) == 0


def gathered(value: _T, group: dist.ProcessGroup | None) -> list[_T]:
    """The values of all ranks."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    with lost_as_error():
        dist.all_gather_object(found, value, group=group)
    return found


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are."""
    return 1 if group is None else dist.get_world_size(group)
