"""What keeps a device from being used is named before its first kernel."""

from pathlib import Path

import pytest
import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.device_support import LibraryFacts, check_library, why_no_device

FACTS = LibraryFacts.of(13000, 13000, "800,900,1000")


def test_the_library_says_what_it_was_built_for(emulated) -> None:
    native.ops().load_device_library(str(emulated))
    found = LibraryFacts.of(*native.ops().describe_device_library())
    assert found == LibraryFacts(13000, 13000, ((8, 0), (9, 0)))


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.3, 0.999])
def test_a_library_that_was_copied_in_part_is_named(
    emulated: Path, tmp_path: Path, share: float
) -> None:
    """Opening one may end the process."""
    whole, part = emulated.read_bytes(), tmp_path / "part.so"
    part.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(RuntimeError, match=r"part\.so is cut off: it has [0-9]+ bytes"):
        native.ops().load_device_library(str(part))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("driver", [13000, 13020, 14000])
def test_kernels_run_on_later_devices_and_drivers(capability, driver) -> None:
    check_library(FACTS._replace(driver=driver), "cuda:0", capability)


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (12, 0)])
def test_another_architecture_is_named(capability) -> None:
    major, minor = capability
    says = (
        rf"cuda:0, X, is of architecture sm_{major}{minor}.*sm_80, sm_90, sm_100.*{major}{minor}`"
    )
    with pytest.raises(OperError, match=says):
        check_library(FACTS, "cuda:0, X,", capability)


def test_a_lower_minor_version_than_built_is_named() -> None:
    with pytest.raises(OperError, match="is of architecture sm_80"):
        check_library(FACTS._replace(architectures=((8, 6),)), "cuda:0", (8, 0))


@pytest.mark.parametrize(("driver", "said"), [(12040, "12.4"), (0, "none")])
def test_an_older_driver_is_named(driver, said) -> None:
    with pytest.raises(OperError, match=rf"supports CUDA {said}, and .* built by CUDA 13\.0"):
        check_library(FACTS._replace(driver=driver), "cuda:0", (9, 0))


def test_a_build_without_cuda_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA" in why_no_device()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_devices_are_named(monkeypatch, visible) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all" in why_no_device()


def test_what_the_driver_says_is_passed_on(monkeypatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nUpdate it")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert why_no_device() == "The NVIDIA driver on your system is too old"


def test_of_the_devices_that_are_shown_one_may_be_missing(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OperError, match=r"there are 1 CUDA devices .*CUDA_VISIBLE_DEVICES is '3'"):
        Cuda("cuda:1")
