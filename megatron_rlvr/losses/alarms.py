"""Plain sentences about finalized metrics that mean training has silently stopped or become unsafe."""

from __future__ import annotations

from collections.abc import Mapping

SMALL_ESS_SHARE = 0.1
SMALL_KERNEL_WEIGHT = 0.1
CLIPPED_SHARE = 0.95
SHARE_OF_TIES = 0.01
SAME_POLICY_K3 = 1e-6  # nats per token; a clip of .2 that cuts one token in a hundred means at least 1e-4
LARGE_REFRESH_GAP = 0.1  # nats per token; bf16 makes 0.004, FP8 weights 0.03


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """Sentences for one optimizer update, most of them empty days: an empty list is the normal answer."""
    checks = (_effective_size, _starved_branch, _clamped, _toothless_credit, _impossible_tokens, _refresh_gap)
    return [sentence for check in checks for sentence in check(metrics)]


def step_zero_alarms(metrics: Mapping[str, float], tolerance: float) -> list[str]:
    """The step-0 law: right after a refresh, equal precision, log ratios are 0 to `tolerance` nats in the mean.

    The mean, not the largest: where two experts tie to the last bit, trainer and sampler may route a token differently,
    and that one token's log-prob moves by any amount in two sound implementations. For the same reason a clipped share
    of up to SHARE_OF_TIES is let pass. Where a reference policy of other weights exists, a loss may clip around that
    (decoupled GRPO), and its share of clipped tokens says nothing about the sampler.
    """
    found = []
    gap = metrics.get("refresh/logprob_gap/mean", metrics.get("actor/log_ratio_abs/mean", 0.0))
    if gap > tolerance:
        found.append(
            f"Right after a refresh the trainer and the sampler differ by {gap:.3g} nats per token (tolerance "
            f"{tolerance:g}): compare their weights, temperature, packing and precision before training on."
        )
    clipped = metrics.get("actor/pg_clipfrac", 0.0)
    other_reference = metrics.get("kl/reference/k3", 0.0) > SAME_POLICY_K3
    if clipped > SHARE_OF_TIES and not other_reference:
        found.append(
            f"Right after a refresh {clipped:.1%} of the tokens are clipped, where none can be: log-probs disagree."
        )
    return found


def _effective_size(metrics: Mapping[str, float]) -> list[str]:
    share = metrics.get("ess/kernel/share")
    if share is None or share >= SMALL_ESS_SHARE:
        return []
    return [
        f"The effective sample size after the kernel is {metrics['ess/kernel']:.3g}, {share:.1%} of the batch: a few "
        "samples carry the whole update; refresh the sampler more often or reuse each rollout less."
    ]


def _starved_branch(metrics: Mapping[str, float]) -> list[str]:
    found = []
    for sign in ("positive", "negative"):
        weight = metrics.get(f"kernel_weight/{sign}")
        if weight is not None and weight < SMALL_KERNEL_WEIGHT:
            found.append(
                f"Responses with {sign} advantage keep a mean weight of {weight:.3g}: training on them has all but "
                "stopped; look at log_w and at the weight by response length."
            )
    return found


def _clamped(metrics: Mapping[str, float]) -> list[str]:
    share = metrics.get("actor/pg_clipfrac", 0.0)
    if share < CLIPPED_SHARE:
        return []
    return [
        f"{share:.1%} of the tokens sit at the clip or clamp of the loss: the learner has left the sampler's range."
    ]


def _toothless_credit(metrics: Mapping[str, float]) -> list[str]:
    bound, size = metrics.get("proximal_kl/credit_bound"), metrics.get("actor/advantage_abs", 0.0)
    if bound is None or bound >= size:
        return []
    return [
        f"The KL credit can reach {bound:.3g} at most (beta * cost_clip * min(horizon, length), more with "
        f"tail_decay; mean length {metrics.get('response/length/mean', 0):.0f} tokens) beside advantages of size "
        f"{size:.3g}: it cannot restrain the policy; raise beta or cost_clip."
    ]


def _impossible_tokens(metrics: Mapping[str, float]) -> list[str]:
    share = metrics.get("actor/impossible_tokens", 0.0)
    if share == 0:
        return []
    return [
        f"{share:.2%} of the action tokens have log-probability -inf under the learner or the sampler and get no "
        "gradient: both must score tokens under the distribution that drew them."
    ]


def _refresh_gap(metrics: Mapping[str, float]) -> list[str]:
    gap = metrics.get("refresh/logprob_gap/mean", 0.0)
    if gap <= LARGE_REFRESH_GAP:
        return []
    return [
        f"Right after a refresh the trainer and the sampler differ by {gap:.3g} nats per token, more than "
        "rounding makes in any precision: they do not run the same weights or do not score the same distribution."
    ]
