"""c_t of every loss against plain loops, in every dtype and packing, and where numbers are extreme."""

import math

import pytest
import torch

from megatron_rlvr.losses import LossError, available_losses, token_coefficients

from .naive import Batch, coefficients, random_batch

LENGTHS = [5, 1, 0, 33, 0, 0, 12, 7, 0]
VARIANTS = [
    *[(name, {}) for name in available_losses()],
    (
        "respo",
        {"alpha_pos": 1.5, "beta_pos": 0.3, "lambda_pos": 1.7, "alpha_neg": 0.6, "beta_neg": 0.7, "lambda_neg": 1.5},
    ),
    (
        "respo",
        {"alpha_pos": 3.0, "beta_pos": 0.6, "lambda_pos": 1.2, "alpha_neg": 2.0, "beta_neg": 1.0, "lambda_neg": 0.0},
    ),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.4}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.02}),
    ("cispo", {"weight_low": 0.9, "weight_high": 1.2}),
    *[
        ("proximal_kl", {"horizon": horizon, "cost_clip": clip, "tail_decay": decay, "weighting": weighting})
        for horizon in ("full", 1, 4, 33, 1000)
        for clip, weighting in ((0.05, "token"), (None, "sequence"), (0.2, "none"))
        for decay in (False, True)
    ],
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_equals_plain_loops(name, settings, dtype, tolerance):
    batch = random_batch(1, LENGTHS)
    rounded = Batch(
        **{k: v.double() for k, v in batch.keywords(dtype).items() if k != "cu_seqlens"}, cu_seqlens=batch.cu_seqlens
    )
    got = token_coefficients(name, **batch.keywords(dtype), **settings)
    assert got.dtype == dtype and not got.requires_grad
    torch.testing.assert_close(got.double(), coefficients(name, rounded, **settings), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", available_losses())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(name, dtype):
    batch = random_batch(2, LENGTHS)
    halved = batch.keywords(dtype)
    raised = {k: v.float() if v.is_floating_point() else v for k, v in halved.items()}
    got = token_coefficients(name, **halved)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, token_coefficients(name, **raised), rtol=0, atol=0)


@pytest.mark.parametrize("name", available_losses())
def test_packed_equals_one_by_one_and_any_order(name):
    batch = random_batch(3, LENGTHS)
    together = token_coefficients(name, **batch.keywords())
    alone = [token_coefficients(name, **batch.select([s]).keywords()) for s in range(len(LENGTHS))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    order = [6, 2, 3, 8, 0, 5, 1, 7, 4]
    shuffled = token_coefficients(name, **batch.select(order).keywords())
    torch.testing.assert_close(shuffled, torch.cat([alone[s] for s in order]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", available_losses())
def test_nothing_at_all(name):
    none = random_batch(0, [])
    assert token_coefficients(name, **none.keywords()).shape == (0,)
    assert token_coefficients(name, **random_batch(0, [0, 0]).keywords()).shape == (0,)


@pytest.mark.parametrize("name", available_losses())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("log_w", [1e4, -1e4, 300.0, -300.0])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_extreme_weights_stay_finite(name, dtype, log_w, num_tokens):
    for sign in (1.0, -1.0):
        got = token_coefficients(
            name,
            logprobs=torch.full((num_tokens,), log_w / num_tokens, dtype=dtype),
            behavior_logprobs=torch.zeros(num_tokens, dtype=dtype),
            reference_logprobs=torch.zeros(num_tokens, dtype=dtype),
            advantages=torch.tensor([sign]),
            cu_seqlens=torch.tensor([0, num_tokens]),
        )
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("name", available_losses())
@pytest.mark.parametrize("which", ["logprobs", "behavior_logprobs", "reference_logprobs", "all"])
def test_minus_infinity_touches_its_own_sequence_alone(name, which):
    batch = random_batch(4, [6, 5, 7])
    clean = token_coefficients(name, **batch.keywords())
    keywords = batch.keywords()
    for key in keywords:
        if key == which or (which == "all" and key.endswith("logprobs")):
            keywords[key] = keywords[key].clone()
            keywords[key][8] = -math.inf  # third token of sequence 1
    got = token_coefficients(name, **keywords)
    assert torch.isfinite(got).all()
    others = torch.tensor([0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15, 16, 17])
    torch.testing.assert_close(got[others], clean[others], rtol=1e-9, atol=1e-9)


def test_a_token_masked_everywhere_leaves_the_rest_of_its_sequence_alone():
    """-inf under learner and sampler alike: the response behaves as if the token were not there."""
    batch = random_batch(5, [6, 4])
    without = Batch(
        *(
            row[[0, 1, 3, 4, 5, 6, 7, 8, 9]]
            for row in (batch.logprobs, batch.behavior_logprobs, batch.reference_logprobs)
        ),
        batch.advantages,
        torch.tensor([0, 5, 9]),
    )
    keywords = batch.keywords()
    for key in ("logprobs", "behavior_logprobs", "reference_logprobs"):
        keywords[key][2] = -math.inf
    for name in ("respo", "vespo", "grpo", "pg", "cispo", "proximal_kl"):
        got = token_coefficients(name, **keywords)
        assert got[2] == 0
        expected = token_coefficients(name, **without.keywords())
        torch.testing.assert_close(got[[0, 1, 3, 4, 5, 6, 7, 8, 9]], expected, rtol=1e-12, atol=1e-12)


def test_reference_defaults_to_the_sampler_for_grpo_and_is_required_by_proximal_kl():
    keywords = random_batch(6, [9, 4]).keywords()
    keywords.pop("reference_logprobs")
    coupled = token_coefficients("grpo", **keywords, reference_logprobs=keywords["behavior_logprobs"])
    torch.testing.assert_close(token_coefficients("grpo", **keywords), coupled, rtol=0, atol=0)
    with pytest.raises(LossError, match="needs reference_logprobs"):
        token_coefficients("proximal_kl", **keywords)


def test_sft_ignores_the_sampler():
    keywords = random_batch(7, [3]).keywords() | {"behavior_logprobs": torch.full((3,), math.nan)}
    assert token_coefficients("sft", **keywords).tolist() == [1.0, 1.0, 1.0]
    assert token_coefficients("sft", **(keywords | {"behavior_logprobs": None})).tolist() == [1.0, 1.0, 1.0]


def test_long_float32_packs_keep_their_digits():
    """A million tokens: the last sequence is as exact as the first (a float32 running sum would be off by 1e-2)."""
    lengths = [4096] * 255 + [37]
    batch = random_batch(8, lengths, drift=0.02)
    keywords = batch.keywords(torch.float32)
    last = Batch(
        *(v[-37:].double() for v in list(keywords.values())[:3]),
        batch.advantages[-1:].float().double(),
        torch.tensor([0, 37]),
    )
    for settings in ({}, {"horizon": 8, "tail_decay": True}, {"cost_clip": None, "beta": 3.0}):
        got = token_coefficients("proximal_kl", **keywords, **settings)[-37:]
        torch.testing.assert_close(got.double(), coefficients("proximal_kl", last, **settings), rtol=1e-5, atol=1e-6)
