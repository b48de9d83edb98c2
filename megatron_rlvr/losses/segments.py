"""Sums over the sequences of a packed batch: S sequences, T tokens, boundaries cu_seqlens [S+1]; any may be empty.

Sums run in float64: a running sum over a million float32 tokens would lose the digits the last sequences need. No
Python loop, no atomics, no wait for the device, few temporaries of size T (touching fresh memory costs more than the
arithmetic).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the S sequences lie among the T packed tokens: sequence s holds tokens cu_seqlens[s] .. cu_seqlens[s+1]-1.

    cu_seqlens [S+1] int64, from 0 to num_tokens, never falling
    """

    cu_seqlens: Tensor
    num_tokens: int

    @cached_property
    def lengths(self) -> Tensor:
        """[S] int64, tokens."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @cached_property
    def ids(self) -> Tensor:
        """[T] int32, the sequence of each token."""
        return torch.repeat_interleave(self.lengths.int(), output_size=self.num_tokens)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [T]: each sequence's value on all of its tokens."""
        return per_sequence.index_select(0, self.ids)

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64: the sum of each sequence, 0 for an empty one."""
        return torch.segment_reduce(values.double(), "sum", offsets=self.cu_seqlens, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64: the mean of each sequence, 0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def suffix_sum(self, values: Tensor) -> Tensor:
        """[T] -> [T] float64: the sum of a token's value and of all later ones of its own sequence.

        suffix(i) = suffix(i-1) - value(i-1) inside a sequence, and each first token adds its sequence's total: one
        running sum gives all suffixes and returns to zero between sequences, so rounding stays at one sequence's scale.
        """
        # slot T takes the totals of empty sequences at the end
        steps = torch.empty(self.num_tokens + 1, dtype=torch.float64, device=values.device)
        steps[:1].zero_()
        steps[1:].copy_(values)
        total = self.sum(steps[1:])
        return steps.neg_().index_put_((self.cu_seqlens[:-1],), total, accumulate=True).cumsum_(0)[:-1]

    def shifted(self, values: Tensor, distance: int) -> Tensor:
        """[T] -> [T - distance]: the value `distance` tokens later, 0 where that token is of another sequence."""
        same = self.ids[: self.num_tokens - distance] == self.ids[distance:]
        return torch.where(same, values[distance:], 0.0)
