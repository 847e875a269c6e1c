"""What every test shares: where the real logs are, and how hypothesis searches."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support.examples import QUICK_EXAMPLES

if TYPE_CHECKING:
    from tests.support.runtime.worlds import Worlds

# A shell's background jobs ignore Ctrl-C, and so would the commands that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent

# The same examples in every run, as a test that fails should fail for the next reader too. Tests
# say their own numbers of examples by `examples`, so that a profile acts on all of them:
# pytest --hypothesis-profile thorough.
for name, times in (("quick", 1), ("thorough", 4)):
    hypothesis.settings.register_profile(
        name, derandomize=True, deadline=None, max_examples=times * QUICK_EXAMPLES
    )
hypothesis.settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is of `make test`, or of `make check`, or slow."""
    for item in items:
        if item.get_closest_marker("check") and item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid} is marked as check and as slow")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs beside the checkout; tests that read it are skipped without it."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real logs are not here: no folder ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def worlds() -> Iterator["Worlds"]:
    """Ranks for all tests of a run, in worlds of several sizes."""
    from tests.support.runtime.worlds import Worlds

    with Worlds() as started:
        yield started


@pytest.fixture(scope="session")
def ranks(worlds: "Worlds") -> "Worlds":
    return worlds
