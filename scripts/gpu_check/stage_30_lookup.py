"""The lookup: bytes per second, against a copy, torch's embedding_bag and FBGEMM's TBE.

Rows of fp32 on one rank, 26 features, 1.7 to 2.1 million rows a launch from an arena of 10 GB,
three draws of ids in turn. Bytes are those of rows, addresses and output. The L2 cache serves a
part of the Zipf ids, which may then take less time than their bytes from memory; targets are for
uniform ids. `spread` is the difference of two measurements of one version. FBGEMM's figures are
null if it is not installed.
"""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check.lookup_case import (
    FEATURES,
    INPUTS,
    LookupCase,
    fbgemms_table,
    measured_cases,
)

SECONDS = 35.0
NEEDS = ("torch", "numpy", "pyarrow")


def records(library: str | None) -> Iterator[dict[str, Any]]:
    for record, copied in measured_cases(library, measure):
        yield {**record, "of_copy": record["bytes_per_second"] / copied}


def measure(device: Any, arena: Any, ids: str, samples: int, length: int) -> dict[str, Any]:
    """Time one lookup and check it against torch's."""
    import torch

    from scripts.gpu_check.timing import timed

    cases = [LookupCase(arena, ids, samples, length) for _ in range(INPUTS)]
    bases = torch.tensor([[arena.data_ptr(), 0]], device=arena.device)
    out_elements = samples * FEATURES * arena.shape[1]

    def ours(case: LookupCase) -> Any:
        offsets = None if length == 1 else case.starts
        arguments = (
            case.addresses,
            offsets,
            None,
            case.words,
            bases,
            0,
            out_elements,
            torch.float32,
        )
        return device.ops().pooled_rows(*arguments, device.stream)

    def torchs(case: LookupCase) -> Any:
        return torch.nn.functional.embedding_bag(case.slots, arena, case.starts[:-1], mode="sum")

    expected = torchs(cases[0]).view(FEATURES, samples, -1).transpose(0, 1).reshape(-1)
    same = bool(torch.allclose(ours(cases[0]), expected, rtol=1e-5, atol=1e-5))
    time, of_torch = (timed(work, cases, arena.device) for work in (ours, torchs))
    tbe, of_fbgemm = fbgemms_table(arena), None
    if tbe is not None:
        tbe.split_embedding_weights()[0].copy_(arena)

        def fbgemms(case: LookupCase) -> Any:
            with torch.no_grad():
                return tbe(case.slots, case.starts)

        same &= bool(torch.allclose(expected, fbgemms(cases[0]).reshape(-1), rtol=1e-5, atol=1e-5))
        of_fbgemm = timed(fbgemms, cases, arena.device)
    accesses = cases[0].accesses
    moved = accesses * (4 * arena.shape[1] + 8) + 4 * out_elements
    return {
        "rows": accesses,
        "seconds": time.seconds,
        "spread": time.spread,
        "bytes_per_second": moved / time.seconds,
        "torch_seconds": of_torch.seconds,
        "times_torch": of_torch.seconds / time.seconds,
        "fbgemm_seconds": of_fbgemm and of_fbgemm.seconds,
        "times_fbgemm": of_fbgemm and of_fbgemm.seconds / time.seconds,
        "failed": not same,
    }
