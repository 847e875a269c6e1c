"""Exchange of values between ranks outside of steps, as JSON, within the engine's deadline.

`group` is None for a single rank. LostRankError names the ranks that did not come.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.group import Group
from oper.runtime.comm.lost_ranks import LostRankError

_T = TypeVar("_T")
_COME = "come to save or load"
_LENGTH_BYTES = 8


def of_first_rank(make: Callable[[], _T], group: Group | None) -> _T:
    """Return on all ranks the JSON value that rank 0 makes. If rank 0 fails, the others raise an
    OperError with the same text."""
    if group is None:
        return make()
    made: Any = None
    failure: Exception | None = None
    said = ""
    if group.rank == 0:
        try:
            made = make()
        except LostRankError:
            raise
        except Exception as error:  # Whatever the error, the others must stop waiting.
            named = isinstance(error, OperError)
            failure, said = error, _said(error) if named else f"rank 0 failed: {_said(error)}"
    told = gathered((made, said), group)[0]
    if failure is not None:
        raise failure
    if told[1]:
        raise OperError(told[1])
    return told[0]


def of_each_rank(make: Callable[[], _T], group: Group | None) -> _T:
    """Return the value that each rank makes by itself, before all continue together. If one fails,
    the others raise an OperError with the same text."""
    failure, said = None, ""
    try:
        made = make()
    except LostRankError:
        raise
    except Exception as error:  # Whatever the error, the others must stop waiting.
        failure, said = error, _said(error)
    for rank, text in enumerate(gathered(said, group)):
        if failure is not None:
            raise failure
        if text:
            raise OperError(f"rank {rank} failed: {text}")
    return made


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OperError) else repr(error)


def is_first(group: Group | None) -> bool:
    """Return whether this rank makes the values that all ranks share."""
    return group is None or group.rank == 0


def gathered(value: _T, group: Group | None) -> list[_T]:
    """Return the JSON values of all ranks: tuples become lists."""
    if group is None:
        return [value]
    message = json.dumps(value).encode()
    sizes = group.gather(len(message).to_bytes(_LENGTH_BYTES, "little"), _COME)
    most = max(int.from_bytes(size, "little") for size in sizes)
    padded = torch.frombuffer(bytearray(message.ljust(most)), dtype=torch.uint8)
    boxes = torch.empty(group.ranks * most, dtype=torch.uint8)
    group.run(dist.all_gather_into_tensor, boxes, padded, action=_COME)
    return [json.loads(box.numpy().tobytes()) for box in boxes.split(most)]


def ranks_of(group: Group | None) -> int:
    """Return the number of ranks."""
    return 1 if group is None else group.ranks
