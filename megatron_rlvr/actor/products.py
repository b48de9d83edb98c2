"""Matrix products for tiles of logits: float32 results whatever the operands' dtype, in memory that is used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def tile_logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float, buffer: torch.Tensor) -> torch.Tensor:
    """Float32 logits [n, width] of one tile, in `buffer`."""
    z = buffer[: len(hidden) * len(rows)].view(len(hidden), len(rows))
    product(hidden, rows.t(), z)
    return z if temperature == 1.0 else z.div_(temperature)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, with float32 `out` whatever the operands are."""
    if a.dtype == torch.float32:
        out.addmm_(a, b, beta=int(add))
    elif add:
        out.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def room_for(like: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Float32 memory for `rows` rows of `like` where products cannot read it as it is, else None.

    Only CUDA multiplies bf16 into float32; the CPU gets the same values in float32.
    """
    if like.is_cuda or like.dtype == torch.float32:
        return None
    return torch.empty(rows, like.shape[1], dtype=torch.float32)


def operand(x: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
    """What a product of `x` reads: `x`, or its values in `room` until that is filled again."""
    return x if room is None else room[: len(x)].copy_(x)


@contextlib.contextmanager
def exact_products(hidden: torch.Tensor) -> Iterator[None]:
    """Let the CPU use its bf16 units for float32 tensors that hold bf16 values: same products, sums kept in float32."""
    if hidden.is_cuda or hidden.dtype != torch.bfloat16:
        yield
        return
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
