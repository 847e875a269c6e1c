"""Where oper's operators for devices take their arguments from."""

from typing import Any

_ON_HOST = {"features"}
_SUMS = {"oper::sum_gradients", "oper::update_runs"}  # take even those from the device


def is_on_host(func: Any, argument: str) -> bool:
    """Whether an operator takes an argument in the host's memory."""
    ours = func.namespace in ("oper", "oper_emulated")
    return ours and func.name().replace("_emulated", "") not in _SUMS and argument in _ON_HOST
