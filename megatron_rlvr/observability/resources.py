"""What the process of rank 0 takes: memory of the host, and of its GPU where it has one."""

from __future__ import annotations

import psutil
import torch

GIB = 2**30


def memory_metrics() -> dict[str, float]:
    """perf/cpu_memory_used_gb, and on CUDA the peaks of torch's allocator since the process began."""
    metrics = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / GIB}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
    return metrics
