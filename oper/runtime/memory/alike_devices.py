"""The check that the devices of all ranks can be used together."""

from oper.base.errors import OperError
from oper.runtime.comm.lost_ranks import rank_names
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cpu, Device


def check_alike(node: Node, device: Device) -> None:
    """Check that all ranks are on the CPU, or all on devices of one architecture. For all ranks to
    call; OperError on all of them if they differ."""
    if node.group is None:
        return
    architectures = node.group.gather(device.architecture.encode().ljust(8), "compare devices")
    ranks_with: dict[str, list[int]] = {}
    for rank, architecture in enumerate(architectures):
        ranks_with.setdefault(architecture.decode().strip(), []).append(rank)
    on_cpu = ranks_with.pop(Cpu.architecture, [])
    if on_cpu and ranks_with:
        others = sorted(rank for ranks in ranks_with.values() for rank in ranks)
        raise OperError(
            f"the tables of {rank_names(on_cpu)} are on the CPU, and those of "
            f"{rank_names(others)} on CUDA devices: give all ranks devices, each its own "
            '(torch.device("cuda", LOCAL_RANK)), or all the CPU'
        )
    if len(ranks_with) > 1:
        groups = "; ".join(f"{rank_names(r)}: {name}" for name, r in sorted(ranks_with.items()))
        raise OperError(
            f"ranks are on devices of unlike architectures ({groups}): plans are made and kernels "
            "tested for devices of one; start ranks on those of one"
        )
