"""What a batch says about itself: ratios, KL, tails, effective sample size, clipping. All sums, see `metrics.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rlvr.losses.bins import tail_sums, weight_by_length_sums
from megatron_rlvr.losses.core import PackedTokens, PolicyLoss, Terms
from megatron_rlvr.losses.hyperparameters import LOG_WEIGHT_CLAMP, Hyperparameters

Sums = dict[str, Tensor]


def metric_sums(
    loss: PolicyLoss, tokens: PackedTokens, terms: Terms, settings: Hyperparameters, has_reference: bool
) -> Sums:
    """All diagnostics of one call; keys depend on the loss and on whether a reference was given, never on the data."""
    sums = response_sums(tokens)
    if not loss.uses_behavior:
        return sums
    sums.update(ratio_sums(tokens))
    sums.update(log_weight_sums(tokens))
    sums.update(kernel_sums(tokens, terms, loss.kernel is not None))
    if has_reference:
        sums.update(kl_sums("reference", tokens.reference_log_ratio, sampled_from_learner=True))
    if loss.measures is not None:
        sums.update(loss.measures(tokens, settings))
    return sums


def response_sums(tokens: PackedTokens) -> Sums:
    """Length of the trained responses in tokens and size of their advantages."""
    chosen = tokens.lengths > 0
    sums = moments("response/length", tokens.lengths.double(), chosen)
    sums["actor/advantage_abs/num"] = (tokens.advantages.abs() * chosen).sum()
    sums["actor/advantage_abs/den"] = chosen.sum().double()
    return sums


def ratio_sums(tokens: PackedTokens) -> Sums:
    """Token ratio pi_theta/pi_behav: mean, extremes, approximate KL, and how many tokens are masked by -inf."""
    ratio = tokens.token_weights(LOG_WEIGHT_CLAMP)
    masked = torch.isneginf(tokens.behavior_logprobs) | torch.isneginf(tokens.logprobs)
    sums = kl_sums("behavior", tokens.log_ratio, sampled_from_learner=False)
    sums["actor/ppo_kl/num"] = sums["kl/behavior/k1/num"].clone()
    sums["actor/ppo_kl/den"] = sums["kl/behavior/k1/den"].clone()
    sums["actor/ratio/num"] = ratio.sum(dtype=torch.float64)
    sums["actor/ratio/den"] = _count(ratio)
    sums["actor/ratio/max"] = _largest(ratio)
    sums["actor/ratio/min"] = -_largest(-ratio)
    sums["actor/log_ratio_abs/max"] = _largest(tokens.log_ratio.abs())
    sums["actor/log_ratio_abs/mean/num"] = tokens.log_ratio.abs().sum(dtype=torch.float64)
    sums["actor/log_ratio_abs/mean/den"] = _count(ratio)
    sums["actor/impossible_tokens/num"] = masked.sum().double()
    sums["actor/impossible_tokens/den"] = _count(ratio)
    return sums


def kl_sums(other: str, log_ratio: Tensor, sampled_from_learner: bool) -> Sums:
    """k1 and k3 estimates of KL between learner and `other` over sampled tokens; log_ratio [T] = learner - other.

    KL(sampler || q): k1 = log sampler - log q, k3 = r - 1 - log r with r = q/sampler. To the behaviour policy, which
    drew the tokens, it is KL(behaviour || learner); to the reference KL(learner || reference), the learner as sampler.
    """
    log_r = -log_ratio if sampled_from_learner else log_ratio
    k3 = torch.expm1(log_r.clamp(max=LOG_WEIGHT_CLAMP)) - log_r
    return {
        f"kl/{other}/k1/num": -log_r.sum(dtype=torch.float64),
        f"kl/{other}/k1/den": _count(log_r),
        f"kl/{other}/k3/num": k3.sum(dtype=torch.float64),
        f"kl/{other}/k3/den": _count(log_r),
    }


def log_weight_sums(tokens: PackedTokens) -> Sums:
    """log W of whole responses before the clamp, by the sign of the advantage (0 belongs to neither)."""
    sums: Sums = {}
    nonempty = tokens.lengths > 0
    for sign, chosen in (("positive", tokens.advantages > 0), ("negative", tokens.advantages < 0)):
        sums.update(moments(f"log_w/{sign}", tokens.log_w, chosen & nonempty))
    return sums


def kernel_sums(tokens: PackedTokens, terms: Terms, per_response: bool) -> Sums:
    """Weights before and after the kernel or clip: tails by log W, effective sample size, branch means, clip share."""
    mass = tokens.segments.mean(terms.coefficients.abs())
    sums = tail_sums(tokens.log_w, tokens.advantages, mass, tokens.lengths, positive=True)
    sums.update(tail_sums(tokens.log_w, tokens.advantages, mass, tokens.lengths, positive=False))
    weights = terms.weights if per_response else tokens.segments.mean(terms.weights)
    sums.update(weight_by_length_sums(weights, tokens.lengths))
    sums.update(_effective_sizes(tokens, terms, per_response))
    clipped = mass.new_zeros(1) if terms.clipped is None else terms.clipped
    sums["actor/pg_clipfrac/num"] = (clipped * tokens.lengths if per_response else clipped).sum().double()
    sums["actor/pg_clipfrac/den"] = _count(tokens.logprobs)
    return sums


def _effective_sizes(tokens: PackedTokens, terms: Terms, per_response: bool) -> Sums:
    """Effective sizes of raw and kernel weights, mean kernel weight per branch; over responses or over tokens."""
    if per_response:
        raw, advantages = tokens.log_w.clamp(-LOG_WEIGHT_CLAMP, LOG_WEIGHT_CLAMP).exp(), tokens.advantages
        chosen = tokens.lengths > 0
    else:
        raw, advantages = tokens.token_weights(LOG_WEIGHT_CLAMP), tokens.token_advantages
        chosen = torch.ones_like(raw, dtype=torch.bool)
    sums = {**_effective_size("ess/raw", raw, chosen), **_effective_size("ess/kernel", terms.weights, chosen)}
    for sign, branch in (("positive", advantages > 0), ("negative", advantages < 0)):
        sums[f"kernel_weight/{sign}/num"] = (terms.weights * (branch & chosen)).sum(dtype=torch.float64)
        sums[f"kernel_weight/{sign}/den"] = (branch & chosen).sum().double()
    return sums


def _effective_size(name: str, weights: Tensor, chosen: Tensor) -> Sums:
    weights = weights.double() * chosen
    return {
        f"{name}/ess_sum": weights.sum(),
        f"{name}/ess_square": (weights * weights).sum(),
        f"{name}/ess_count": chosen.sum().double(),
    }


def moments(name: str, values: Tensor, chosen: Tensor) -> Sums:
    """Mean, std, min and max of the chosen values [S]."""
    kept = values * chosen
    return {
        f"{name}/mean/num": kept.sum(),
        f"{name}/mean/den": chosen.sum().double(),
        f"{name}/mean/square": (kept * kept).sum(),
        f"{name}/max": _largest(values.masked_fill(~chosen, -torch.inf)),
        f"{name}/min": -_largest((-values).masked_fill(~chosen, -torch.inf)),
    }


def _count(values: Tensor) -> Tensor:
    return torch.full((), len(values), dtype=torch.float64, device=values.device)


def _largest(values: Tensor) -> Tensor:
    """[] float64: the maximum; -inf, the identity of max, for nothing."""
    return torch.cat([values, values.new_full((1,), -torch.inf)]).max().double()
