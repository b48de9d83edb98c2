"""What every policy loss is made of: the packed tokens it reads, the terms it returns, and its entry in the registry.

Every loss here is  -(1/N) sum_t stop_gradient(c_t) log pi_theta(t);  a loss file defines c_t and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rlvr.losses.hyperparameters import Hyperparameters
from megatron_rlvr.losses.segments import Segments

IMPOSSIBLE_LOG_RATIO = 1e4  # nats; stands for log 0 - finite: far beyond any clamp, yet finite in every sum


@dataclass(frozen=True)
class PackedTokens:
    """The detached inputs of a loss: S sequences, T action tokens, log-probs in nats, float32 or float64.

    logprobs            [T] learner pi_theta
    behavior_logprobs   [T] sampler pi_behav; -inf marks a token the sampler cannot have drawn: its coefficient, log
                        ratio and KL cost are 0, and still counts in the length of its response
    reference_logprobs  [T] proximal reference pi_k
    advantages          [S] float64
    segments            where the sequences lie
    all_finite          no log-prob is -inf
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    reference_logprobs: Tensor
    advantages: Tensor
    segments: Segments
    all_finite: bool

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens

    @property
    def lengths(self) -> Tensor:
        """[S] int64, tokens."""
        return self.segments.lengths

    @cached_property
    def log_ratio(self) -> Tensor:
        """[T] log pi_theta - log pi_behav, finite; 0 for a masked token."""
        ratio = self.logprobs - self.behavior_logprobs
        return ratio.nan_to_num_(nan=0.0, posinf=0.0, neginf=-IMPOSSIBLE_LOG_RATIO)

    @cached_property
    def reference_log_ratio(self) -> Tensor:
        """[T] l_t = log pi_theta - log pi_k, finite; 0 where both are impossible and for a masked token."""
        ratio = self.logprobs - self.reference_logprobs
        if not self.all_finite:
            ratio.masked_fill_(torch.isneginf(self.behavior_logprobs), 0.0)
        return ratio.nan_to_num_(nan=0.0, posinf=IMPOSSIBLE_LOG_RATIO, neginf=-IMPOSSIBLE_LOG_RATIO)

    @cached_property
    def log_w(self) -> Tensor:
        """[S] float64, log of the product of all token ratios of a response, before any clamp."""
        return self.segments.sum(self.log_ratio)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [T] in the dtype of the log-probs."""
        return self.segments.expand(per_sequence.to(self.logprobs.dtype))

    @cached_property
    def token_advantages(self) -> Tensor:
        """[T] the advantage of the response a token belongs to."""
        return self.expand(self.advantages)

    def token_weights(self, clamp: float) -> Tensor:
        """[T] w_t = pi_theta/pi_behav, its log capped at `clamp` so that it cannot overflow."""
        return self.log_ratio.clamp(max=clamp).exp_()


@dataclass(frozen=True)
class Terms:
    """What a loss says about a packed batch.

    coefficients  [T] c_t
    weights       [S] (losses with a kernel) or [T]: what multiplies the advantage, clipped parts included as 0
    clipped       [S] or [T] bool, or None: where the loss's clip or clamp cuts the weight or switches it off
    """

    coefficients: Tensor
    weights: Tensor
    clipped: Tensor | None = None


SequenceKernel = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyLoss:
    """One entry of the registry.

    terms      (PackedTokens, settings) -> Terms
    kernel     sequence-level losses: (log_w [S], lengths [S], advantages [S], settings) -> (phi [S], clipped [S]),
               so that a layout which splits a response over ranks can complete log_w and lengths first
    measures   sums that only this loss reports, keyed as `metrics.py` explains
    reference  whether reference_logprobs must be given; "optional" means pi_k = pi_behav when they are not
    """

    name: str
    hyperparameters: type[Hyperparameters]
    terms: Callable[[PackedTokens, Any], Terms]
    kernel: SequenceKernel | None = None
    measures: Callable[[PackedTokens, Any], dict[str, Tensor]] | None = None
    reference: Literal["unused", "optional", "required"] = "unused"
    uses_behavior: bool = True


def sequence_loss(name: str, hyperparameters: type[Hyperparameters], kernel: SequenceKernel) -> PolicyLoss:
    """A loss whose coefficient is the same for all tokens of a response: c = phi(log W) * A."""

    def terms(tokens: PackedTokens, hp: Hyperparameters) -> Terms:
        phi, clipped = kernel(tokens.log_w, tokens.lengths, tokens.advantages, hp)
        return Terms(tokens.expand(phi * tokens.advantages), phi, clipped)

    return PolicyLoss(name, hyperparameters, terms, kernel=kernel)


def by_sign(advantages: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """[S]: the positive branch where A >= 0, else the negative one (SPEC 2)."""
    return torch.where(advantages >= 0, positive, negative)
