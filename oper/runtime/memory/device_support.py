"""Checks that a CUDA device can be used here, made before the first kernel: afterwards CUDA's own
errors say little, such as "initialization error"."""

import os
import re
from typing import NamedTuple

import torch

from oper.base.errors import OperError, first_line


class LibraryFacts(NamedTuple):
    """Facts about the build of the library of device kernels (csrc/include/oper/cuda/launchers.h).

    driver, runtime: versions of CUDA, as 13000: the version that the driver supports, 0 if there is
    none, and that of the runtime in the library. architectures: major and minor version each.
    """

    driver: int
    runtime: int
    architectures: tuple[tuple[int, int], ...]

    @staticmethod
    def of(driver: int, runtime: int, architectures: str) -> "LibraryFacts":
        """Return the facts in the result of the operator describe_device_library."""
        numbers = [int(number) for number in re.findall("[0-9]+", architectures)]
        return LibraryFacts(driver, runtime, tuple((n // 100, n // 10 % 10) for n in numbers))


def why_no_device() -> str:
    """Return why torch finds no CUDA device: it was built without CUDA, devices are hidden, or the
    driver's own words."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one for CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all; unset it"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises errors of several kinds here
        return first_line(error)
    return f"torch {torch.__version__} finds none{said_visible()}; see `nvidia-smi`"


def said_visible() -> str:
    """Return the devices that the environment shows, for an error; nothing if it shows all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def check_library(facts: LibraryFacts, device: str, capability: tuple[int, int]) -> None:
    """Raise OperError if the kernels do not run on a device of this capability, or with its driver.

    A driver runs code that was built by a runtime of its own major version, and kernels of an
    architecture run on devices of its major version and no lower minor version.
    """
    if facts.driver // 1000 < facts.runtime // 1000:
        raise OperError(
            f"{device}: its driver supports CUDA {_version(facts.driver)}, and the device kernels "
            f"were built by CUDA {_version(facts.runtime)}: install a driver for that, or build "
            f"them by CUDA {facts.driver // 1000} (scripts/build_cuda.py)"
        )
    major, minor = capability
    if not any(m == major and n <= minor for m, n in facts.architectures):
        built = ", ".join(f"sm_{m}{n}" for m, n in facts.architectures)
        raise OperError(
            f"{device} is of architecture sm_{major}{minor}, and the device kernels were built for "
            f"{built}: build them for it, `python scripts/build_cuda.py --architectures "
            f"{major}{minor}`"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"
