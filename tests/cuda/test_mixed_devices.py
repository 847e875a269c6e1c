"""Tensors of the host and of a device are not mixed on the way of a batch, of a state dict, or of
what pipelines ask for; where they are, the tests find it."""

from pathlib import Path

import pytest
import torch

from tests.support.cuda import mixed_device_cases as cases
from tests.support.cuda.pretended import build_guard
from tests.support.runtime import mortal_ranks

if torch.version.cuda is not None:
    pytest.skip("torch is built for CUDA: its devices tell themselves", allow_module_level=True)


@pytest.fixture(scope="module")
def libraries(emulated: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The emulated kernels, and the guard of devices that are none."""
    return str(emulated), str(build_guard(tmp_path_factory.mktemp("guard")))


@pytest.mark.parametrize(
    "case",
    [
        cases.served,
        cases.trained,
        cases.recorded,
        cases.bad_batches,
        cases.saved_and_loaded,
        cases.pipelined,
    ],
)
def test_nothing_is_mixed(libraries, case):
    assert mortal_ranks.run(1, case, *libraries) == [None]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("offsets", "pooled_rows: offsets is on the host"),
        ("descriptors", "features is on the device"),
        ("bases", "pooled_rows: bases is on the host"),
        ("output", "aten::add.Tensor of tensors on cuda:0, cpu"),
    ],
)
def test_what_is_mixed_is_found(libraries, what, said):
    (found,) = mortal_ranks.run(1, cases.planted, *libraries, what)
    assert said in found
