"""The one exception for mistakes that a user can correct.

Its message has the expected value, the given value, the place, and the remedy. The command line
prints it without a traceback and exits with status 2; any other exception is a defect of oper.
"""

from typing import Any


class OperError(Exception):
    """Bad input, an impossible request, or a failure of the machine such as a full disk."""


def one_line(error: BaseException) -> str:
    """Return the message of another library's error, as part of a line: without line ends, not
    long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none: messages of torch
    and the system have many lines, of which the first has the cause."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class OperWarning(UserWarning):
    """Warning about an input that is read nevertheless; the command line prints it."""


class OperNotice(OperWarning):
    """Note on the interpretation of a valid input; the command line prints it without the word
    warning."""


def check_type(function: str, name: str, given: Any, *kinds: type) -> None:
    """Raise OperError if the argument `name` of a public function, such as a path in place of a
    plan, has none of these types."""
    if not isinstance(given, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise OperError(f"{function}: {name}: expected {expected}, got {type(given).__name__}")
