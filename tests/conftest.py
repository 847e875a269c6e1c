"""What every test shares: where the real logs are, and how hypothesis searches."""

from pathlib import Path

import hypothesis
import pytest

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
