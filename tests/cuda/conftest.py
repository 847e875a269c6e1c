"""The device kernels, compiled for the emulator, and once a run for devices."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import torch

from oper.base import native
from scripts import build_cuda
from tests.support.cuda.devices import Cuda, Device, Emulated
from tests.support.cuda.emulator import Emulator, kept
from tests.support.once import Once

if importlib.util.find_spec("torchrec") is None:  # as on a machine with a device and little else
    collect_ignore = ["test_graph_step.py", "test_mixed_devices.py", "test_torchrec.py"]


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> Path:
    """The library of all kernels, emulated; that which was given (given_kernels.py), if one was."""
    given: Path | None = request.config.getoption("--emulated-kernels", None)
    if given is not None:
        return given
    return kept("cuda")


@pytest.fixture(scope="session")
def emulated_nvshmem() -> Path:
    """The library of the kernels for NVSHMEM, emulated, with a fake NVSHMEM in it."""
    return kept("nvshmem")


@pytest.fixture(scope="module", params=["emulated", "on_cuda"])
def library(request: pytest.FixtureRequest) -> str | None:
    """The emulated kernels, or None where the device itself is meant."""
    if request.param == "on_cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        return None
    emulated: Path = request.getfixturevalue("emulated")
    return str(emulated)


@pytest.fixture(scope="module", params=["emulated", "on_cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """Where kernels run: in the emulator, and on a device where there is one."""
    if request.param == "on_cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        native.device_ops.cache_clear()  # the emulated library may be loaded
        native.device_ops()
        return Cuda()
    library = request.getfixturevalue("emulated")
    native.ops().load_device_library(str(library))
    return Emulated(Emulator(library))


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """A CUDA toolkit; tests that compile for devices are skipped without it."""
    found = build_cuda.toolkit()
    if found is None:
        pytest.skip("no CUDA compiler here: pip install -r requirements-cuda.txt")
    return found


@pytest.fixture(scope="session")
def objects(toolkit: Path, once: Once) -> dict[Path, str]:
    """Compiled kernels of all architectures, each with what the compiler said of registers."""
    return compiled(once, "cuda", toolkit)


def compiled(once: Once, name: str, toolkit: Path, nvshmem: Path | None = None) -> dict[Path, str]:
    """What `build_cuda.compile_all` makes, once a run, in a folder of this name."""

    def make(folder: Path) -> None:
        made = build_cuda.compile_all(toolkit, folder, build_cuda.ARCHITECTURES, 2, nvshmem)
        said = {path.name: said for path, said in made.items()}
        (folder / "said.json").write_text(json.dumps(said))

    try:
        folder = once(name, make)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr, pytrace=False)
    said = json.loads((folder / "said.json").read_text())
    return {folder / name: text for name, text in said.items()}
