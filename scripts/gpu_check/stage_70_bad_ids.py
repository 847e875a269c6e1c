"""Bad ids: an error that names the id, and a device that goes on working."""

from collections.abc import Iterator
from typing import Any

SECONDS = 30.0
NEEDS = ("torch", "numpy", "safetensors")


def records() -> Iterator[dict[str, Any]]:
    import torch

    from tests.cuda.test_translate import arguments
    from tests.support.cuda.devices import Cuda
    from tests.support.cuda.one_table import address_map

    device, made = Cuda(), address_map(50)
    segments = torch.tensor([0, 40]), torch.tensor([0])
    good = torch.arange(40)
    for bad in (-1, 50, 1 << 40):
        values = good.clone()
        values[17] = bad
        try:
            device.run("translate", *arguments(made, device, values, *segments))
            said = "nothing"
        except IndexError as error:
            said = str(error).splitlines()[0]
        after = device.run("translate", *arguments(made, device, good, *segments))
        works = bool(torch.equal(after, made.translate(0, good)))
        yield {
            "id": bad,
            "said": said,
            "works_after": works,
            "failed": "number 17" not in said or not works,
        }
