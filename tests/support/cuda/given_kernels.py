"""A pytest plugin (`-p tests.support.cuda.given_kernels`): tests of kernels run with a library of
emulated kernels that was built before, as one with AddressSanitizer, and draw few examples."""

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("few", derandomize=True, deadline=None, max_examples=8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated-kernels", type=Path, help="the library")
