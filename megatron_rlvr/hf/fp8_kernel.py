"""The block quantiser's inner loops for CPUs, compiled by numba.

torch's own operations make a dozen passes over memory and convert to float8 one number at a time. Here a block's
largest magnitude is an integer maximum over its bit patterns (float order is integer order without the sign), and
scaling, rounding and packing are one pass of 32-bit lanes over the row of a block. Bitcasts and the numpy error model
(division does not raise) keep the loops free of branches, so that the compiler can use vectors.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

_BLOCK = 128
_SIGNLESS = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_LARGEST = np.float32(448.0)
_LARGEST_BITS = np.uint32(0x43E00000)  # 448 as float32
_SMALLEST_SCALE = np.float32(2.0**-126)
_SMALLEST_SCALE_BITS = np.uint32(1 << 23)
_FIRST_NORMAL = np.uint32(121 << 23)  # 2^-6, the smallest normal e4m3 value
_REBIAS = np.uint32(120 << 23)  # float32's exponent bias 127 less e4m3's 7
_HALF_LESS_ONE = np.uint32(0x7FFFF)  # with the lowest kept bit added, this rounds to nearest even at bit 20
_ALIGN = np.float32(16384.0)  # beside it float32 steps by 2^-9, as subnormal e4m3 does: the sum rounds to nearest even
_ALIGN_BITS = np.uint32(141 << 23)


@intrinsic
def _bits(context: Any, number: Any) -> Any:
    """float32 -> uint32 with the same bits."""
    to = types.uint32
    return to(types.float32), lambda ctx, builder, sig, args: builder.bitcast(args[0], ctx.get_value_type(to))


@intrinsic
def _number(context: Any, bits: Any) -> Any:
    """uint32 -> float32 with the same bits."""
    to = types.float32
    return to(types.uint32), lambda ctx, builder, sig, args: builder.bitcast(args[0], ctx.get_value_type(to))


@numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _scale(largest: Any, pow2: Any) -> Any:
    """The scale of a block from the bits of its largest magnitude."""
    if largest == 0:
        return np.float32(1.0)
    scale = max(np.float32(_number(largest) / _LARGEST), _SMALLEST_SCALE)
    if pow2:  # the next power of two, or the scale itself where it is one
        scale = _number(np.uint32((_bits(scale) + np.uint32(0x7FFFFF)) & _INFINITE))
    return scale


@numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _code(scaled: Any) -> Any:
    """e4m3 bits of a finite float32, rounded to nearest even; magnitudes above 448 saturate.

    numba widens integer results to 64 bits: each is cut back, or vectors would hold half as many.
    """
    bits = _bits(scaled)
    size = min(np.uint32(bits & _SIGNLESS), _LARGEST_BITS)
    odd = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(np.uint32(np.uint32(size + _HALF_LESS_ONE) + odd) - _REBIAS) >> np.uint32(20))
    subnormal = np.uint32(_bits(_number(size) + _ALIGN) - _ALIGN_BITS)
    code = subnormal if size < _FIRST_NORMAL else normal
    return np.uint8(code | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def quantise_blocks(weight: Any, quantised: Any, scales: Any, pow2: bool) -> bool:
    """Fill `quantised` [out, in] uint8 and `scales` [ceil(out/128), ceil(in/128)] float32; False where not finite.

    weight   [out, in] bits of bfloat16 (uint16) or float32 (uint32), contiguous
    """
    width = 8 * weight.itemsize
    shift, signless = np.uint32(32 - width), (1 << (width - 1)) - 1
    columns, magnitudes = np.empty(_BLOCK, weight.dtype), np.empty(_BLOCK, weight.dtype)
    finite = True
    for i in range(scales.shape[0]):
        top, bottom = i * _BLOCK, min((i + 1) * _BLOCK, weight.shape[0])
        for j in range(scales.shape[1]):
            left, right = j * _BLOCK, min((j + 1) * _BLOCK, weight.shape[1])
            columns[:] = 0
            for r in range(top, bottom):
                row = weight[r, left:right]
                for c in range(row.size):  # stored before they are compared: 16-bit lanes again
                    magnitudes[c] = row[c] & signless
                for c in range(row.size):
                    columns[c] = max(columns[c], magnitudes[c])
            largest = np.uint32(np.uint32(columns.max()) << shift)
            finite = finite and bool(largest < _INFINITE)
            scale = _scale(largest, pow2)
            scales[i, j] = scale
            for r in range(top, bottom):
                row, target = weight[r, left:right], quantised[r, left:right]
                for c in range(row.size):
                    target[c] = _code(_number(np.uint32(np.uint32(row[c]) << shift)) / scale)
    return finite
