"""Block quantisation to FP8 e4m3 and back, as checkpoints with `weight_block_size` [128, 128] store it.

Each 128 x 128 block of a weight has one float32 scale: its largest magnitude over 448, the largest e4m3 value
(DeepSeek-V3, section 3.3.2). Stored are q = round_to_nearest_even(w / scale) and `weight_scale_inv` = scale, so that w
is about q * weight_scale_inv. A block of zeros has scale 1: a zero would look like a scale that was never written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a subnormal scale would lose the weight's leading digits
_KERNEL_VIEWS = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}

Quantised = tuple[torch.Tensor, torch.Tensor]


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Shape of `weight_scale_inv` for a weight [out, in]: [ceil(out/128), ceil(in/128)]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantise_block(weight: torch.Tensor, pow2: bool = False, out: Quantised | None = None) -> Quantised:
    """(float8_e4m3fn [out, in], float32 scale_inv [ceil(out/128), ceil(in/128)]) of a weight [out, in].

    pow2   round scales up to powers of two, which hardware with E8M0 scales wants; costs up to one bit of the range
    out    tensors to fill and return; a caller that quantises tensor after tensor saves the memory's first touch

    On a CPU, bfloat16 and float32 weights take one pass in cache per row of blocks (`fp8_kernel`); other dtypes and
    devices take torch operations. Both give the same bits. Raises ValueError for a weight that is not a matrix or not
    finite.
    """
    if weight.dim() != 2:
        raise ValueError(f"a weight to quantise has shape [out, in], not {list(weight.shape)}")
    if out is None:
        out = (
            torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device),
            torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device),
        )
    if weight.device.type == "cpu" and weight.dtype in _KERNEL_VIEWS:
        finite = _run_kernel(weight, pow2, out)
    else:
        finite = _run_torch(weight, pow2, out)
    if not finite:
        raise ValueError("the weight has NaN or infinite values, which FP8 cannot hold")
    return out


def dequantise_block(
    quantised: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The weight [out, in] that `quantise_block`'s results stand for: the product in float32, rounded to `dtype`.

    Raises ValueError where the scales do not belong to a tensor of that shape.
    """
    if tuple(scale_inv.shape) != scale_shape(quantised.shape):
        raise ValueError(
            f"scale_inv has shape {list(scale_inv.shape)}, but a weight {list(quantised.shape)} has scales "
            f"{list(scale_shape(quantised.shape))}"
        )
    weight = torch.empty(quantised.shape, dtype=dtype, device=quantised.device)
    columns = scale_inv.float().repeat_interleave(BLOCK, 1)[:, : quantised.shape[1]]
    for row, (part, target) in enumerate(zip(quantised.split(BLOCK), weight.split(BLOCK), strict=True)):
        target.copy_(part.float() * columns[row])
    return weight


def _run_kernel(weight: torch.Tensor, pow2: bool, out: Quantised) -> bool:
    from megatron_rlvr.hf.fp8_kernel import quantise_blocks  # compiles, so only where something is quantised

    quantised, scales = out
    bits = weight.detach().contiguous().view(_KERNEL_VIEWS[weight.dtype]).numpy()
    return bool(quantise_blocks(bits, quantised.view(torch.uint8).numpy(), scales.numpy(), pow2))


def _run_torch(weight: torch.Tensor, pow2: bool, out: Quantised) -> bool:
    quantised, scales = out
    rows, columns = weight.shape
    above, beside = scales.shape
    padded = F.pad(weight.detach().float(), (0, beside * BLOCK - columns, 0, above * BLOCK - rows))
    blocks = padded.view(above, BLOCK, beside, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scales.copy_(torch.where(largest > 0, (largest / E4M3_MAX).clamp(min=SMALLEST_SCALE), 1.0))
    if pow2:
        mantissa, exponent = torch.frexp(scales)
        scales.copy_(torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int()))
    codes = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    quantised.copy_(codes.view(above * BLOCK, beside * BLOCK)[:rows, :columns])
    return bool(torch.isfinite(largest).all())
