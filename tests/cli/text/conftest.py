"""Output of commands: sentences name flags, as in a command."""

from collections.abc import Iterator

import pytest

from oper.base.spoken import by_command_line


@pytest.fixture(autouse=True)
def _in_a_command() -> Iterator[None]:
    with by_command_line():
        yield
