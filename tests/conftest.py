"""What every test shares: where the real logs are, and how hypothesis searches."""

import functools
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.groups import reason_for
from tests.support.cases import repeated
from tests.support.examples import QUICK_EXAMPLES
from tests.support.once import Once, made_once

if TYPE_CHECKING:
    from tests.support.runtime.worlds import Worlds

# A shell's background jobs ignore Ctrl-C, and so would the commands that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The processes of a run take all cores between them. Threads that wait for others of their process
# sleep then, instead of keeping a core busy that another one has work for: a fifth of the time.
# OpenMP reads it where torch is first imported, here and in what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPOSITORY = Path(__file__).resolve().parent.parent

# The same examples in every run, as a test that fails should fail for the next reader too. Tests
# say their own numbers of examples by `examples`, so that a profile acts on all of them:
# pytest --hypothesis-profile thorough.
for name, times in (("few", 0.2), ("quick", 1), ("thorough", 8)):
    hypothesis.settings.register_profile(
        name, derandomize=True, deadline=None, max_examples=round(times * QUICK_EXAMPLES)
    )
hypothesis.settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported while tests are looked for is never garbage. To look through it for some,
    over and over, was half of the time, and went on in each collection of tests that run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the markers `more` and `drawn` (tests/groups.py)."""
    by_test: dict[str, list[Any]] = {}
    for item in items:
        marked = [name for name in ("check", "slow") if item.get_closest_marker(name)]
        if len(marked) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked as check and as slow")
        if not marked:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in by_test.items():
        listed = reason_for(name) is not None
        # pytest has no public name for the ids of a case's parametrisations.
        ids = [case.callspec._idlist if hasattr(case, "callspec") else () for case in cases]
        for case, again in zip(cases, repeated(ids), strict=True):
            if listed or again:
                case.add_marker("more")
            elif hypothesis.is_hypothesis_test(case.obj):
                case.add_marker("drawn")


@pytest.fixture(scope="module")
def small_programmes() -> Iterator[None]:
    """Integer programmes over all classes only of a dozen classes, for modules whose subject is not
    their optimum: they are most of the time that planning a few hundred rows takes."""
    from oper.planner import exact_placement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_placement, "MOST_COLUMNS", 50)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs beside the checkout; tests that read it are skipped without it."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real logs are not here: no folder ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def once(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes what all processes of this run share (tests/support/once.py)."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):  # one of xdist's, whose folders lie in the run's
        folder = folder.parent
    return functools.partial(made_once, folder)


@pytest.fixture(scope="session")
def worlds() -> Iterator["Worlds"]:
    """Ranks for all tests of a run, in worlds of several sizes."""
    from tests.support.runtime.worlds import Worlds

    with Worlds() as started:
        yield started


@pytest.fixture(scope="session")
def ranks(worlds: "Worlds") -> "Worlds":
    return worlds
