"""Small arrays of a folder in one safetensors file."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.files.input_files import LISTED, read_bytes


def save_safetensors(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays by name."""
    from safetensors.numpy import save

    # Not save_file, which makes the file readable by its owner only.
    path.write_bytes(save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))


def load_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read arrays by name; raise OperError if the file is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(read_bytes(path, LISTED))
    except (SafetensorError, ValueError) as error:
        raise OperError(f"{path}: is not a readable safetensors file ({error})") from error
