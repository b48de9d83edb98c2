"""What must hold whatever the numbers: shapes of the kernels, special cases that coincide, bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.losses import available_losses, find_loss, hyperparameters_for, token_coefficients

from .naive import random_batch

quick = settings(max_examples=40, deadline=None)
log_weights = st.floats(-19.0, 19.0)
seeds = st.integers(0, 10_000)
packings = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def phi(name: str, log_w: torch.Tensor | list[float] | float, sign: float, **settings) -> torch.Tensor:
    """[n] kernel weights at the given log W for advantages of one sign."""
    log_w = torch.as_tensor(log_w, dtype=torch.float64).reshape(-1)
    lengths, advantages = torch.ones(len(log_w), dtype=torch.int64), torch.full_like(log_w, sign)
    kernel = find_loss(name).kernel
    assert kernel is not None
    return kernel(log_w, lengths, advantages, hyperparameters_for(name)(**settings))[0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["respo", "vespo"])
def test_weight_one_and_slope_at_on_policy(name, sign):
    assert float(phi(name, 0.0, sign)) == 1.0
    h = 1e-5
    slope = (phi(name, math.log(1 + h), sign) - phi(name, math.log(1 - h), sign)) / (2 * h)
    expected = {"respo": -0.5, "vespo": -1.0 if sign > 0 else 1.0}[name]
    assert float(slope) == pytest.approx(expected, abs=1e-8)


@given(alpha=st.floats(0.2, 4.0), beta=st.floats(0.05, 0.95), lam=st.floats(0.0, 4.0))
@quick
def test_general_alpha_keeps_weight_one_and_slope_beta_times_one_minus_lambda(alpha, beta, lam):
    chosen = {"alpha_pos": alpha, "beta_pos": beta, "lambda_pos": lam}
    assert float(phi("respo", 0.0, 1.0, **chosen)) == 1.0
    slope = (phi("respo", 1e-5, 1.0, **chosen) - phi("respo", -1e-5, 1.0, **chosen)) / 2e-5
    assert float(slope) == pytest.approx(beta * (1 - lam), abs=1e-6)


@given(log_weights, log_weights)
@quick
def test_respo_positive_branch_falls_and_stays_positive(first, second):
    low, high = sorted((first, second))
    left, right = phi("respo", [low, high], 1.0).tolist()
    assert left >= right >= 0 and (right > 0 or high > 6)
    if high - low > 0.1 and max(abs(low), abs(high)) < 6:
        assert left > right


def test_respo_limits():
    e = math.e
    assert float(phi("respo", -1e4, 1.0)) == pytest.approx(e / 2, rel=1e-6)
    assert float(phi("respo", -2.0, 1.0)) == pytest.approx(1.348, abs=5e-4)
    assert float(phi("respo", 1e4, 1.0)) == 0.0
    assert float(phi("respo", math.log(0.25), -1.0)) == pytest.approx(e / 2, rel=1e-12)
    around = phi("respo", torch.linspace(-8, 8, 2001), -1.0)
    assert (
        float(around.max()) <= e / 2
        and abs(float(torch.linspace(-8, 8, 2001)[around.argmax()]) - math.log(0.25)) < 0.01
    )
    assert float(phi("respo", 1e4, -1.0)) == 0.0 and float(phi("respo", -1e4, -1.0)) < 4e-4
    assert float(phi("vespo", -2.0, 1.0)) == pytest.approx(0.245, abs=5e-4)
    assert float(phi("vespo", -4.0, 1.0)) == pytest.approx(0.006, abs=1e-3)


@given(log_weights, st.sampled_from([1.0, -1.0]), st.sampled_from([1e-9, -1e-9, 1e-7, -1e-7, 1e-11, -1e-13, 1e-30]))
@quick
def test_alpha_near_one_meets_its_limit(log_w, sign, offset):
    branch = "pos" if sign > 0 else "neg"
    chosen = {f"beta_{branch}": 0.5, f"lambda_{branch}": 2.0}
    limit = phi("respo", log_w, sign, **chosen, **{f"alpha_{branch}": 1.0})
    near = phi("respo", log_w, sign, **chosen, **{f"alpha_{branch}": 1.0 + offset})
    # log phi0 moves by b(1-b)/2 * offset * log_w^2 at first order, log phi by that times 1 - lam phi0
    slack = abs(offset) * log_w**2 * (1 + 2 * math.exp(0.5 * log_w)) + 1e-12
    assert float(near) == pytest.approx(float(limit), rel=slack, abs=1e-300)


@given(log_weights, st.floats(0.1, 6.0), st.floats(0.0, 1.0), st.floats(0.0, 5.0), st.sampled_from([1.0, -1.0]))
@quick
def test_any_alpha_is_finite_and_not_negative(log_w, alpha, beta, lam, sign):
    branch = "pos" if sign > 0 else "neg"
    got = float(
        phi("respo", log_w, sign, **{f"alpha_{branch}": alpha, f"beta_{branch}": beta, f"lambda_{branch}": lam})
    )
    assert math.isfinite(got) and got >= 0


@given(seeds, packings)
@quick
def test_grpo_with_the_sampler_as_reference_is_the_ppo_surrogate(seed, lengths):
    """The gradient of sum min(rho A, clip(rho) A) by autograd is c_t, DAPO's asymmetric range included."""
    keywords = random_batch(seed, lengths).keywords()
    keywords["reference_logprobs"] = keywords["behavior_logprobs"]
    logprobs = keywords["logprobs"].clone().requires_grad_()
    rho = torch.exp(logprobs - keywords["behavior_logprobs"])
    advantages = torch.repeat_interleave(keywords["advantages"], keywords["cu_seqlens"].diff())
    torch.minimum(rho * advantages, rho.clamp(0.8, 1.28) * advantages).sum().backward()
    got = token_coefficients("grpo", **keywords, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(got, logprobs.grad, rtol=1e-12, atol=1e-12)


@given(seeds, packings)
@quick
def test_proximal_kl_without_cost_is_pg(seed, lengths):
    keywords = random_batch(seed, lengths).keywords()
    torch.testing.assert_close(
        token_coefficients("proximal_kl", **keywords, beta=0.0), token_coefficients("pg", **keywords), rtol=0, atol=0
    )


@given(seeds, packings, st.integers(12, 100), st.booleans())
@quick
def test_a_horizon_beyond_the_response_is_the_full_one(seed, lengths, horizon, decay):
    keywords = random_batch(seed, lengths).keywords()
    windowed = token_coefficients("proximal_kl", **keywords, horizon=horizon, tail_decay=decay)
    torch.testing.assert_close(windowed, token_coefficients("proximal_kl", **keywords), rtol=1e-12, atol=1e-12)


@given(seeds, packings, st.integers(1, 8), st.floats(0.01, 0.5), st.booleans())
@quick
def test_credit_bounds(seed, lengths, horizon, clip, decay):
    """|C_i| <= beta eps_F min(H, T-i+1); tail decay adds the falling weights, never beyond the full horizon's bound."""
    keywords = random_batch(seed, lengths).keywords() | {"advantages": torch.zeros(len(lengths), dtype=torch.float64)}
    credit = -token_coefficients(
        "proximal_kl", **keywords, beta=0.3, horizon=horizon, cost_clip=clip, tail_decay=decay, weighting="none"
    )
    left = torch.tensor([t - i for t in lengths for i in range(t)], dtype=torch.float64)
    falling = ((left - horizon - 1).clamp(min=0) / 2) if decay else 0.0
    assert (credit.abs() <= 0.3 * clip * (left.clamp(max=horizon) + falling) + 1e-12).all()
    assert (credit.abs() <= 0.3 * clip * left + 1e-12).all()


@given(seeds, packings, st.randoms(use_true_random=False))
@quick
def test_order_of_sequences_does_not_matter(seed, lengths, random):
    batch = random_batch(seed, lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    for name in available_losses():
        parts = token_coefficients(name, **batch.keywords()).split(lengths)
        shuffled = token_coefficients(name, **batch.select(order).keywords())
        torch.testing.assert_close(shuffled, torch.cat([parts[s] for s in order]), rtol=1e-11, atol=1e-11)


@given(seeds, packings)
@quick
def test_on_policy_every_method_is_the_plain_advantage(seed, lengths):
    """Learner, sampler and reference agree: nothing is clipped, no cost, ratio 1 (the step-0 law)."""
    keywords = random_batch(seed, lengths, drift=0.0).keywords()
    expected = torch.repeat_interleave(keywords["advantages"], keywords["cu_seqlens"].diff())
    for name in set(available_losses()) - {"sft"}:
        torch.testing.assert_close(token_coefficients(name, **keywords), expected, rtol=1e-12, atol=0)
