"""GPUs that a plan is made for: figures of the vendors' data sheets, and the shares of them that training reaches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlvr.types import UserError

GPUS_PER_NODE = 8
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU of an eight-GPU node.

    memory_gib        what torch reports as total, a little less than the name says
    bf16, fp8         dense TFLOP/s (without sparsity)
    hbm               memory bandwidth, TB/s
    nvlink, network   GB/s per GPU in one direction: inside the node, and between nodes with one NIC per GPU
    mfu_dense, mfu_moe  share of the bf16 peak that forward and backward reach (docs/plan.md): small
                      experts keep a GPU's matrix units waiting, the faster the GPU the more
    """

    name: str
    memory_gib: float
    bf16: float
    fp8: float
    hbm: float
    nvlink: float
    network: float
    mfu_dense: float = 0.35
    mfu_moe: float = 0.10


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80g", 79.1, 989, 1979, 3.35, 450, 50),
        Gpu("h200", 139.8, 989, 1979, 4.8, 450, 50),
        Gpu("h20-96g", 95.1, 148, 296, 4.0, 450, 50, mfu_dense=0.45, mfu_moe=0.40),
        Gpu("a800-80g", 79.1, 312, 312, 2.04, 200, 25, mfu_dense=0.40, mfu_moe=0.10),
    )
}


def find_gpu(name: str) -> Gpu:
    """The row of the table. Raises UserError for a name that is not in it."""
    if name not in GPUS:
        raise UserError(f"--gpu is {name}, which is not in the table of GPUs; use one of {', '.join(GPUS)}")
    return GPUS[name]
