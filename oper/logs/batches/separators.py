"""Separators of columns and of list items, as users write them in a shell."""

import re

from oper.base.errors import OperError

_NAMES = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
# \t, \x01, \u0001, \001 as Hive prints it, and ^A as editors show it.
_ESCAPE = re.compile(r"\\(?:(t)|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([0-3][0-7]{2}))|\^([A-Z])")
_MOST_CHARACTERS = 8


def separator(text: str, option: str) -> str:
    r"""Return the separator that a name (`tab`), an escape (`\x01`) or a plain text stands for.

    Raise OperError if it is empty, long, or has a quote, a line end, a letter or a digit, which
    belong to the values.
    """
    mark = _NAMES.get(text) or _ESCAPE.sub(_character, text)
    if not 0 < len(mark) <= _MOST_CHARACTERS or re.search(r"[\"\r\n\0]|[^\W_]", mark):
        raise OperError(
            f"{option} {text[:80]!r}: expected 1 to {_MOST_CHARACTERS} characters without quotes, "
            rf"line ends, letters and digits, such as ';' or '::', an escape such as '\t' or "
            rf"'\x01', or one of {', '.join(_NAMES)}"
        )
    return mark


def _character(escape: re.Match[str]) -> str:
    tab, two, four, octal, control = escape.groups()
    if tab:
        return "\t"
    if control:
        return chr(ord(control) - 64)
    return chr(int(octal, 8) if octal else int(two or four, 16))
