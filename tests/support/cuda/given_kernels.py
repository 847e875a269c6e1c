"""A pytest plugin (`-p tests.support.cuda.given_kernels`): tests of kernels run with a library of
emulated kernels that was built before, as one with AddressSanitizer."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated-kernels", type=Path, help="the library")
