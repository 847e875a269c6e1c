"""The lookup: bytes per second beside a copy, torch's embedding_bag and FBGEMM's TBE.

Rows of fp32 on one rank, 26 features, 1.7 to 2.1 million rows a launch from an arena of 10 GB.
Bytes are those of rows, addresses and output. Zipf ids are served from the second cache in part, so
that they may take less time than their bytes would from memory; bars are for uniform ids. FBGEMM's
figures are null where it is not installed.
"""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check.lookup_case import FEATURES, LookupCase, fbgemms_table, measured_cases

SECONDS = 90.0
NEEDS = ("torch", "numpy", "pyarrow")


def records(**sizes: Any) -> Iterator[dict[str, Any]]:
    """`sizes` are those of measured_cases."""
    for found, copied in measured_cases(measure, **sizes):
        yield {**found, "of_copy": found["bytes_per_second"] / copied}


def measure(arena: Any, ids: str, samples: int, length: int) -> dict[str, Any]:
    """One lookup, checked against torch's."""
    import torch

    from oper.base import native
    from scripts.gpu_check.timing import median_seconds, stream

    case = LookupCase(arena, ids, samples, length)
    bases = torch.tensor([[arena.data_ptr(), 0]], device=arena.device)
    ops = native.device_ops() if arena.is_cuda else native.ops()
    out_elements = samples * FEATURES * case.dim
    offsets = None if length == 1 else case.starts

    def ours() -> Any:
        given = (case.addresses, offsets, None, case.words, bases, 0, out_elements, torch.float32)
        return ops.pooled_rows(*given, stream(arena.device))

    def torchs() -> Any:
        return torch.nn.functional.embedding_bag(case.slots, arena, case.starts[:-1], mode="sum")

    expected = torchs().view(FEATURES, samples, case.dim).transpose(0, 1).reshape(-1)
    same = bool(torch.allclose(ours(), expected, rtol=1e-5, atol=1e-5))
    seconds, seconds_of_torch = (median_seconds(work, arena.device) for work in (ours, torchs))
    tbe, seconds_of_fbgemm = fbgemms_table(arena), None
    if tbe is not None:
        tbe.split_embedding_weights()[0].copy_(arena)

        def fbgemms() -> Any:
            with torch.no_grad():
                return tbe(case.slots, case.starts)

        same &= bool(torch.allclose(ours(), fbgemms().reshape(-1), rtol=1e-5, atol=1e-5))
        seconds_of_fbgemm = median_seconds(fbgemms, arena.device)
    moved = case.accesses * (4 * case.dim + 8) + 4 * out_elements
    return {
        "rows": case.accesses,
        "seconds": seconds,
        "bytes_per_second": moved / seconds,
        "torch_seconds": seconds_of_torch,
        "times_torch": seconds_of_torch / seconds,
        "fbgemm_seconds": seconds_of_fbgemm,
        "times_fbgemm": None if seconds_of_fbgemm is None else seconds_of_fbgemm / seconds,
        "failed": not same,
    }
