"""Messages of other libraries' errors, as parts of our own."""

from oper.base.errors import first_line, one_line


def test_the_first_line_says_what_happened() -> None:
    assert first_line(RuntimeError("\n  out of memory\n  frame 1\n")) == "out of memory"


def test_an_error_without_a_message_is_its_type() -> None:
    assert first_line(RuntimeError()) == one_line(RuntimeError()) == "RuntimeError"
