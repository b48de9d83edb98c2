"""nucleus_floor against a plain sort, and linear_logprob under a floor against autograd of whole truncated logits.

Two ranks: `logprob_worker`, which test_fused_logprob launches.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rlvr.actor.fused_logprob import linear_logprob
from megatron_rlvr.actor.nucleus import nucleus_floor
from megatron_rlvr.types import LogprobDistribution
from tests.actor.logprob_reference import Largest, error, make_inputs, naive_support, numbers, truncated_logprob


def found_support(hidden, weight, distribution, vocab_size, **chunks):
    floor = nucleus_floor(hidden, weight, distribution, group=None, vocab_size=vocab_size, **chunks)
    assert floor.dtype == torch.float32 and floor.shape == hidden.shape[:1] and not floor.requires_grad
    logits = (hidden.float() @ weight[:vocab_size].float().t()) / distribution.temperature
    return floor, logits >= floor.unsqueeze(1), logits


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 7),
    vocab_size=st.integers(1, 300),
    padding=st.integers(0, 5),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.one_of(st.just(-1), st.integers(1, 320)),
    levels=st.sampled_from([None, 1, 2, 6]),
    size=st.sampled_from([0.1, 3.0, 20.0]),
    chunks=st.tuples(st.integers(1, 9), st.integers(1, 400)),
    seed=st.integers(0, 2**31),
)
def test_the_support_is_that_of_a_plain_sort(
    tokens, vocab_size, padding, temperature, top_p, top_k, levels, size, chunks, seed
):
    """`levels`: whole numbers only, so that many ids tie and every product is exact."""
    hidden, weight, _, _ = make_inputs(tokens, 3, vocab_size, padding, seed=seed, size=size)
    if levels is not None:
        hidden = torch.eye(3).repeat(3, 1)[:tokens]
        weight = (weight * levels / size).round()
    distribution = LogprobDistribution(temperature, top_p, top_k)
    _, support, logits = found_support(
        hidden, weight, distribution, vocab_size, chunk_tokens=chunks[0], chunk_vocab=chunks[1]
    )
    expected = naive_support(logits, top_p, top_k)
    assume(expected is not None)
    assert torch.equal(support, expected)


def test_the_id_that_crosses_stays_and_top_p_follows_top_k():
    """Worked by hand: 0.5 0.25 0.125 0.125; after top-k 2 the rest is 2/3 1/3, so that 0.6 leaves one and 0.7 two."""
    weight = torch.tensor([[0.5], [0.25], [0.125], [0.125]]).log()
    for top_p, top_k, kept in ((0.45, -1, 1), (0.55, -1, 2), (0.8, -1, 4), (0.6, 2, 1), (0.7, 2, 2), (1.0, 3, 4)):
        _, support, _ = found_support(torch.ones(1, 1), weight, LogprobDistribution(1.0, top_p, top_k), 4)
        assert support.sum() == kept, (top_p, top_k)


def test_other_rounding_of_the_logits_leaves_the_support_as_it_is():
    """The floor lies between two logits, away from both: a last bit more or less decides nothing."""
    hidden, weight, _, _ = make_inputs(40, 16, 500, size=4.0)
    floor, support, logits = found_support(hidden, weight, LogprobDistribution(0.6, 0.8, 20), 500)
    for factor in (1 - 3e-7, 1 + 3e-7):
        assert torch.equal(logits * factor >= floor.unsqueeze(1), support)


def test_bf16_ranks_the_float32_products_of_its_inputs():
    hidden, weight, _, _ = make_inputs(20, 16, 300, dtype=torch.bfloat16, size=4.0)
    _, support, logits = found_support(hidden, weight, LogprobDistribution(0.6, 0.8, 5), 300, chunk_vocab=64)
    assert torch.equal(support, naive_support(logits, 0.8, 5))


@pytest.mark.parametrize("temperature, top_p, top_k", [(0.6, 0.8, 5), (0.6, 0.9, -1), (1.0, 1.0, 3), (1.0, 1.0, 5000)])
def test_values_and_gradients_are_those_of_whole_truncated_logits(temperature, top_p, top_k):
    """Float32 to 1e-5; labels of every kind: within the nucleus, and outside, where they alone are added to it."""
    hidden, weight, labels, upstream = make_inputs(70, 64, 2000, padding=8, size=4.0)
    distribution = LogprobDistribution(temperature, top_p, top_k)
    floor, support, logits = found_support(hidden, weight, distribution, 2000)
    labels[::2] = logits[::2].argmax(1)
    vocabulary = {"group": None, "vocab_size": 2000, "temperature": temperature}
    fused = partial(linear_logprob, labels=labels, floor=floor, chunk_tokens=32, chunk_vocab=300, **vocabulary)
    naive = partial(truncated_logprob, labels=labels, vocab_size=2000, temperature=temperature, support=support)
    found = numbers(fused, hidden, weight, upstream)
    expected = numbers(naive, hidden, weight, upstream, torch.float64)
    for name, a, b in zip(("logprobs", "entropy", "grad hidden", "grad weight"), found, expected, strict=True):
        assert error(a, b) < 1e-5, name
    assert found[0].isfinite().all()
    unused = ~(support.any(0).index_fill(0, labels, True))
    assert not found[3][:2000][unused].any() and (top_k == 5000 or unused.sum() > 500)


def test_no_floor_and_a_floor_that_cuts_nothing_give_the_same_bits():
    hidden, weight, labels, upstream = make_inputs(30, 8, 100, padding=4)
    floor = nucleus_floor(hidden, weight, LogprobDistribution(0.6), group=None, vocab_size=100)
    assert (floor == float("-inf")).all()
    fused = partial(linear_logprob, labels=labels, group=None, vocab_size=100, temperature=0.6, chunk_vocab=32)
    whole = numbers(fused, hidden, weight, upstream)
    cut = numbers(partial(fused, floor=floor), hidden, weight, upstream)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_no_more_than_one_chunk_of_logits_is_held():
    hidden, weight, _, _ = make_inputs(256, 8, 3000, size=4.0)
    with Largest() as largest:
        nucleus_floor(hidden, weight, LogprobDistribution(0.6, 0.8), group=None, vocab_size=3000, chunk_tokens=16)
    assert largest.numel == 16 * 3000 < weight.numel() * 3


def test_a_nan_reaches_its_own_token_only():
    hidden, weight, labels, _ = make_inputs(5, 4, 200)
    hidden[2, 1] = float("nan")
    floor = nucleus_floor(hidden, weight, LogprobDistribution(1.0, 0.8, 5), group=None, vocab_size=200)
    logprobs, entropy = linear_logprob(hidden, weight, labels, group=None, vocab_size=200, floor=floor)
    assert logprobs.isnan().nonzero().flatten().tolist() == entropy.isnan().nonzero().flatten().tolist() == [2]


def test_a_floor_that_does_not_fit_is_refused():
    hidden, weight, labels, _ = make_inputs(5, 4, 30)
    for floor in (torch.zeros(4), torch.zeros(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"floor is torch\.float"):
            linear_logprob(hidden, weight, labels, group=None, vocab_size=30, floor=floor)
