"""Gigabytes of weights per second that the FP8 block quantiser takes on one core, beside a copy of the same bytes.

    python tools/bench_quantise.py [--rows 4096] [--columns 4096] [--repeats 9] [--compile]

Processor time, best of the repeats, all in one run, since machines differ and other load comes and goes. `eager` is the
same arithmetic in torch operations, `--compile` adds torch.compile of it (which needs a C++ compiler).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_rlvr.hf.fp8 import BLOCK, E4M3_MAX, dequantise_block, quantise_block


def eager(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block quantisation in plain torch operations, for sizes that are multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).float()
    scales = blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX
    return (blocks / scales).to(torch.float8_e4m3fn).view(rows, columns), scales[:, 0, :, 0]


def best_seconds(action: Callable[[], Any], repeats: int) -> float:
    """Least processor seconds of this thread; the first call (compilation, first touch of memory) does not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return min(times)


def measure(rows: int, columns: int, repeats: int, compiled: bool) -> list[tuple[str, float]]:
    """(name, GB/s of input) of every variant; a copy of bfloat16 comes first."""
    wide = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight, out = wide.bfloat16(), quantise_block(wide)
    target = torch.empty_like(weight)
    quantised, scales = quantise_block(weight)
    actions: list[tuple[str, torch.Tensor, Callable[[], Any]]] = [
        ("copy", weight, lambda: target.copy_(weight)),
        ("quantise_block bfloat16", weight, lambda: quantise_block(weight, out=out)),
        ("quantise_block pow2", weight, lambda: quantise_block(weight, pow2=True, out=out)),
        ("quantise_block float32", wide, lambda: quantise_block(wide, out=out)),
        ("dequantise_block", quantised, lambda: dequantise_block(quantised, scales)),
        ("eager", weight, lambda: eager(weight)),
    ]
    if compiled:
        fast = torch.compile(eager, dynamic=False)
        actions.append(("torch.compile(eager)", weight, lambda: fast(weight)))
    return [(name, data.nbytes / best_seconds(action, repeats) / 1e9) for name, data, action in actions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4096), ("columns", 4096), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile of the eager form")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speeds = measure(args.rows, args.columns, args.repeats, args.compile)
    copy = speeds[0][1]
    print(f"[{args.rows}, {args.columns}], one core, best of {args.repeats}")
    for name, speed in speeds:
        print(f"{name:24s} {speed:8.3f} GB/s {speed / copy:7.3f}x")


if __name__ == "__main__":
    main()
