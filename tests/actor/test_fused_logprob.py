"""linear_logprob against whole logits in float64: values, gradients, accuracy in bf16, what it keeps and allocates."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.actor.fused_logprob import linear_logprob
from tests.actor.logprob_reference import Largest, error, make_inputs, numbers, plain_logprob, spread
from tests.ranks import run_ranks


def fused(labels, vocab_size, temperature=1.0, **options):
    """linear_logprob as a function of (hidden, weight), over a vocabulary that is not split."""
    return partial(linear_logprob, labels=labels, group=None, vocab_size=vocab_size, temperature=temperature, **options)


def plain(labels, vocab_size, temperature=1.0):
    return lambda hidden, weight: plain_logprob(hidden, weight, labels, vocab_size, temperature)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 17),
    hidden_size=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 5),
    temperature=st.floats(0.2, 4.0),
    chunk_tokens=st.integers(1, 20),
    chunk_vocab=st.integers(1, 50),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_of_whole_logits(
    tokens, hidden_size, vocab_size, padding, temperature, chunk_tokens, chunk_vocab, size, seed
):
    hidden, weight, labels, upstream = make_inputs(tokens, hidden_size, vocab_size, padding, seed=seed, size=size)
    tiles = {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
    found = numbers(fused(labels, vocab_size, temperature, **tiles), hidden, weight, upstream)
    expected = numbers(plain(labels, vocab_size, temperature), hidden, weight, upstream, torch.float64)
    # Log-probs of a few hundred nats cannot be nearer than float32's own resolution of the logits.
    for name, a, b in zip(("logprobs", "entropy", "grad hidden", "grad weight"), found, expected, strict=True):
        assert error(a, b) < 1e-5 * max(1.0, size / temperature / 10), name
    assert not found[3][vocab_size:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_is_within_1e5_of_the_plain_path_at_a_large_vocabulary(temperature):
    hidden, weight, labels, upstream = make_inputs(70, 64, 20_000, padding=8, size=4.0)
    found = numbers(fused(labels, 20_000, temperature, chunk_tokens=32), hidden, weight, upstream)
    expected = numbers(plain(labels, 20_000, temperature), hidden, weight, upstream)
    assert max(error(a, b.double()) for a, b in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tiles", [{}, {"chunk_tokens": 16, "chunk_vocab": 128}], ids=["default", "many tiles"])
def test_bf16_is_no_less_accurate_than_the_plain_path(temperature, tiles):
    hidden, weight, labels, upstream = make_inputs(300, 64, 5000, padding=8, dtype=torch.bfloat16, size=4.0)
    exact = numbers(plain(labels, 5000, temperature), hidden, weight, upstream, torch.float64)
    found = numbers(fused(labels, 5000, temperature, **tiles), hidden, weight, upstream)
    usual = numbers(plain(labels, 5000, temperature), hidden, weight, upstream)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for a, b, c in zip(found, usual, exact, strict=True):
        assert spread(a, c) <= spread(b, c)


def test_bf16_weight_gradient_keeps_what_small_chunks_would_lose():
    """1 + 511 contributions of 2^-9: a bf16 running sum stays at 1, the float32 one reaches 2."""
    tokens = 512
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.full((tokens,), 2.0**-9)
    upstream[0] = 1.0
    labels = torch.zeros(tokens, dtype=torch.int64)
    linear_logprob(hidden, weight, labels, group=None, vocab_size=2, chunk_tokens=1)[0].backward(upstream)
    expected = upstream.sum().item() / 2  # p = 1/2, so each token gives half its upstream gradient
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([expected, -expected], rel=2**-8)


def test_labels_outside_the_vocabulary_are_impossible_and_harm_no_other_token():
    hidden, weight, labels, upstream = make_inputs(4, 3, 10, padding=2)
    labels = torch.tensor([3, 10, 11, -1])
    upstream[1:] = 0.0
    found = numbers(fused(labels, 10, chunk_vocab=4), hidden, weight, upstream)
    expected = numbers(plain(labels[:1], 10), hidden[:1], weight, upstream[:1], torch.float64)
    assert error(found[0][:1], expected[0]) < 1e-6 and found[0][1:].tolist() == [float("-inf")] * 3
    assert error(found[3], expected[3]) < 1e-6 and torch.isfinite(found[2]).all()


def test_logits_of_ten_thousand_stay_finite():
    hidden, weight, labels, upstream = make_inputs(6, 4, 50, size=1e4)
    found = numbers(fused(labels, 50, chunk_vocab=7), hidden, weight, upstream)
    assert all(torch.isfinite(x).all() for x in found)


def test_a_nan_reaches_its_own_token_only():
    hidden, weight, labels, _ = make_inputs(5, 4, 30)
    hidden[2, 1] = float("nan")
    logprobs, entropy = fused(labels, 30, chunk_vocab=8)(hidden, weight)
    assert logprobs.isnan().nonzero().flatten().tolist() == entropy.isnan().nonzero().flatten().tolist() == [2]


def test_entropy_is_optional_and_has_no_gradient():
    hidden, weight, labels, _ = make_inputs(5, 4, 30)
    weight.requires_grad_()
    logprobs, entropy = fused(labels, 30)(hidden, weight)
    alone, nothing = fused(labels, 30, want_entropy=False)(hidden, weight)
    assert nothing is None and torch.equal(alone, logprobs)
    assert not entropy.requires_grad and logprobs.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(frozen):
    hidden, weight, labels, upstream = make_inputs(5, 4, 30)
    expected = numbers(plain(labels, 30), hidden, weight, upstream, torch.float64)
    hidden.requires_grad_(frozen != "hidden"), weight.requires_grad_(frozen != "weight")
    fused(labels, 30)(hidden, weight)[0].backward(upstream)
    kept, gone, truth = (weight, hidden, expected[3]) if frozen == "hidden" else (hidden, weight, expected[2])
    assert gone.grad is None and error(kept.grad, truth) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_logits_is_made_or_kept(dtype):
    tokens, vocab = 256, 3000
    hidden, weight, labels, upstream = make_inputs(tokens, 8, vocab, dtype=dtype)
    weight.requires_grad_()
    kept = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        logprobs, _ = fused(labels, vocab, chunk_tokens=64, chunk_vocab=256)(hidden, weight)
        logprobs.backward(upstream)
    assert largest.numel == max(64 * 256, weight.numel()) < tokens * vocab / 30
    assert sorted(x.numel() for x in kept) == sorted([hidden.numel(), weight.numel(), tokens, tokens])


def test_the_matrix_precision_of_the_process_is_put_back():
    before = torch.backends.mkldnn.matmul.fp32_precision
    hidden, weight, labels, upstream = make_inputs(3, 4, 30, dtype=torch.bfloat16)
    numbers(fused(labels, 30), hidden, weight, upstream)
    with pytest.raises(RuntimeError):
        fused(labels.float(), 30)(hidden, weight)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h, w, y: (h, w[:, :3], y), r"shapes \[\[5, 4\], \[30, 3\], \[5\]\]"),
        (lambda h, w, y: (h, w, y[:4]), r"\[4\]"),
        (lambda h, w, y: (h.bfloat16(), w, y), "same dtype"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    hidden, weight, labels, _ = make_inputs(5, 4, 30)
    with pytest.raises(ValueError, match=message):
        linear_logprob(*change(hidden, weight, labels), group=None, vocab_size=30)
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        linear_logprob(hidden, weight, labels, group=None, vocab_size=30, temperature=0.0)


def test_two_ranks_give_the_numbers_of_one(tmp_path):
    printed = run_ranks("tests.actor.logprob_worker", 2, log_dir=tmp_path, timeout=120)
    assert printed.count("all numbers equal") == 2
