"""Proximal KL: token ratios without a clip, minus the future cost of moving away from a frozen reference (SPEC 4).

l_t = log pi_theta - log pi_k,  C_i = beta sum_{j=i}^{min(T, i+H-1)} clip(l_j, -eps_F, eps_F),  c_i = w_i (A - C_i)
(Proximal KL Eq. 5-7). w corrects the sampling distribution, l measures movement from the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.hyperparameters import Hyperparameters, choice, count_or, flag, log_weight_clamp, number
from megatron_rlvr.losses.segments import Segments


@dataclass(frozen=True)
class ProximalKlHyperparameters(Hyperparameters):
    """beta (cost per nat), horizon H in tokens or "full", cost_clip eps_F in nats or None, tail decay, weighting."""

    beta: float = number(0.30, low=0.0)
    horizon: int | Literal["full"] = count_or("full", "full")
    cost_clip: float | None = number(0.05, above=0.0, optional=True)
    tail_decay: bool = flag(False)
    weighting: Literal["token", "sequence", "none"] = choice("token", "token", "sequence", "none")
    log_w_clamp: float = log_weight_clamp()

    def warnings(self) -> list[str]:
        if self.tail_decay and self.horizon == "full":
            return ["tail_decay=true has no effect with horizon=full: give a horizon in tokens."]
        return []


def future_sum(
    costs: Tensor, segments: Segments, horizon: int | Literal["full"] = "full", tail_decay: bool = False
) -> Tensor:
    """[T] -> [T] float64: sum of the costs of tokens i .. i+H-1 of the same sequence, in O(T).

    With tail decay, position j beyond the last unit position e = i+H-1 weighs (T-j)/(T-e), T the last token (SPEC 4).
    """
    window = segments.suffix_sum(costs)
    if horizon == "full" or horizon >= len(costs):
        return window
    later = segments.shifted(window, horizon)
    window[: len(later)].sub_(later)
    if tail_decay:
        remaining = segments.expand(segments.cu_seqlens[1:].int() - 1)
        remaining -= torch.arange(len(costs), dtype=torch.int32, device=costs.device)  # T - i
        weighted = segments.shifted(segments.suffix_sum(remaining.double().mul_(costs)), horizon)
        window[: len(later)].add_(weighted.div_(remaining[: len(later)].sub_(horizon - 1).clamp_(min=1)))
    return window


def clipped_costs(tokens: PackedTokens, cost_clip: float | None) -> Tensor:
    """[T] l_t, cut to [-eps_F, eps_F] when a bound is given."""
    costs = tokens.reference_log_ratio
    return costs if cost_clip is None else costs.clamp(-cost_clip, cost_clip)


def credits(tokens: PackedTokens, hp: ProximalKlHyperparameters) -> Tensor:
    """[T] float64: C_i, what is subtracted from the advantage."""
    return future_sum(clipped_costs(tokens, hp.cost_clip), tokens.segments, hp.horizon, hp.tail_decay).mul_(hp.beta)


def ratio_weights(tokens: PackedTokens, hp: ProximalKlHyperparameters) -> tuple[Tensor, Tensor | None]:
    """[T] w_i, or one of the two controls of the paper's weighting ablation; and where the cap on its log holds [T]."""
    if hp.weighting == "token":
        return tokens.token_weights(hp.log_w_clamp), tokens.log_ratio > hp.log_w_clamp
    if hp.weighting == "none":
        return torch.ones_like(tokens.logprobs), None
    mean = tokens.segments.mean(tokens.log_ratio)
    return tokens.expand(mean.clamp(max=hp.log_w_clamp).exp()), tokens.segments.expand(mean > hp.log_w_clamp)


def terms(tokens: PackedTokens, hp: ProximalKlHyperparameters) -> Terms:
    """Per token: c_i = w_i (A - C_i). A saturated cost never switches a token's gradient off."""
    weights, capped = ratio_weights(tokens, hp)
    credited = tokens.token_advantages - credits(tokens, hp).to(weights.dtype)
    return Terms(weights * credited, weights, capped)


def credit_bound(lengths: Tensor, hp: ProximalKlHyperparameters) -> Tensor:
    """[S] float64: beta eps_F min(H, T), the most the credit can subtract or add at a response's first token."""
    if hp.cost_clip is None:
        return torch.full_like(lengths, torch.inf, dtype=torch.float64)
    reach = lengths.double() if hp.horizon == "full" else lengths.double().clamp(max=hp.horizon)
    if hp.tail_decay and hp.horizon != "full":  # the falling weights (n-1)/n .. 0 of the n later tokens sum to (n-1)/2
        reach = reach + ((lengths - hp.horizon).double() - 1).clamp(min=0) / 2
    return hp.beta * hp.cost_clip * reach


def measures(tokens: PackedTokens, hp: ProximalKlHyperparameters) -> dict[str, Tensor]:
    """Sums: share of saturated costs, size of the credit, and the bound beside the advantages it has to restrain."""
    size = credits(tokens, hp).abs()
    count = torch.full((), tokens.num_tokens, dtype=torch.float64, device=size.device)
    nonempty = tokens.lengths > 0
    sums = {
        "proximal_kl/credit_abs/num": size.sum(),
        "proximal_kl/credit_abs/den": count,
        "proximal_kl/credit_abs/max": torch.cat([size, size.new_zeros(1)]).max(),
    }
    if hp.cost_clip is not None:
        sums["proximal_kl/saturated/num"] = (tokens.reference_log_ratio.abs() >= hp.cost_clip).sum().double()
        sums["proximal_kl/saturated/den"] = count.clone()
        sums["proximal_kl/credit_bound/num"] = credit_bound(tokens.lengths, hp).sum()
        sums["proximal_kl/credit_bound/den"] = nonempty.sum().double()
    return sums


LOSS = PolicyLoss("proximal_kl", ProximalKlHyperparameters, terms, measures=measures, reference="required")
