"""Arguments of the public functions that are of another type, such as a path for what it names."""

from typing import Any

from oper.base.errors import OperError


def check_type(function: str, name: str, given: Any, *kinds: type) -> None:
    """OperError where the argument `name` of a function is of none of these types."""
    if not isinstance(given, kinds):
        found, needed = type(given).__name__, " or ".join(kind.__name__ for kind in kinds)
        raise OperError(f"{function}: {name} is a {found}, and a {needed} was needed")
