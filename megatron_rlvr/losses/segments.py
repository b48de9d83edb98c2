"""Sums over the sequences of a packed batch: S sequences, T tokens, boundaries cu_seqlens [S+1]; any may be empty.

Sums run in float64: a running sum over a million float32 tokens would lose the digits the last sequences need. No
Python loop, no atomics (the same numbers on every run), no wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand(per_sequence: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """[S] -> [T]: repeat each sequence's value over its tokens."""
    return torch.repeat_interleave(per_sequence, lengths, output_size=num_tokens)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S] float64: the sum of each sequence, 0 for an empty one."""
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens, unsafe=True)


def segment_max(values: Tensor, cu_seqlens: Tensor, empty: float) -> Tensor:
    """[T] -> [S] float64: the largest value of each sequence, `empty` for an empty one."""
    largest = torch.segment_reduce(values.double(), "max", offsets=cu_seqlens, unsafe=True)
    return torch.where(cu_seqlens[1:] > cu_seqlens[:-1], largest, empty)


def segment_mean(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S] float64: the mean of each sequence, 0 for an empty one."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return segment_sum(values, cu_seqlens) / lengths.clamp(min=1)


def segment_suffix_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [T] float64: sum of a token's value and all later ones of its own sequence.

    One running sum from the back, where the token before each sequence also carries minus that sequence's total: the
    running value returns to zero at every boundary, so rounding stays at the scale of one sequence, not of the pack.
    """
    total = segment_sum(values, cu_seqlens)
    restarting = torch.cat([total.new_zeros(1), values.double()])  # slot j holds token j-1; a first sequence has slot 0
    restarting.index_put_((cu_seqlens[:-1],), -total, accumulate=True)
    return restarting.flip(0).cumsum_(0).flip(0)[1:]
