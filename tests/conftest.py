"""What every test shares: where the real logs are, and how hypothesis searches."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.support.torchrec.worlds import Worlds

# A shell's background jobs ignore Ctrl-C, and so would the commands that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent

# The same examples in every run, as a test that fails should fail for the next reader too.
hypothesis.settings.register_profile("oper", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("oper")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs beside the checkout; tests that read it are skipped without it."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real logs are not here: no folder ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def worlds() -> Iterator["Worlds"]:
    """Processes that know torchrec, for all tests of a run, as importing it takes a while."""
    from tests.support.torchrec.worlds import Worlds

    with Worlds() as started:
        yield started


@pytest.fixture(scope="session")
def _planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.commands import make_folder  # pyarrow and typer take a while

    folder = tmp_path_factory.mktemp("planned")
    make_folder(folder)
    return folder


@pytest.fixture
def here(_planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what `tests.support.commands.make_folder` makes."""
    shutil.copytree(_planned, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(params=["in one step", "in two steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With names exchanged in one step, and on a file system that cannot."""
    from oper.files import renames

    if request.param == "in two steps":
        monkeypatch.setattr(renames, "_renameat2", lambda *_: False)
    return request.param
