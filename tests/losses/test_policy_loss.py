"""The loss that the schedule sees: value, gradient, aggregation over micro-batches, refusals."""

import math

import pytest
import torch

from megatron_rlvr.losses import (
    AGGREGATIONS,
    LossError,
    NonFiniteLogprobError,
    aggregation_count,
    available_losses,
    finalize_metrics,
    merge_metrics,
    policy_loss,
    policy_weights,
    response_weights,
    token_coefficients,
)

from .naive import random_batch

LENGTHS = [5, 1, 0, 9, 3]


def with_gradient(keywords: dict) -> dict:
    return keywords | {"logprobs": keywords["logprobs"].clone().requires_grad_()}


@pytest.mark.parametrize("name", available_losses())
def test_gradient_is_minus_the_coefficient_over_the_normalizer(name):
    keywords = with_gradient(random_batch(0, LENGTHS).keywords())
    loss, num_tokens, _ = policy_loss(name, **keywords, normalizer=40)
    loss.backward()
    assert int(num_tokens) == 18
    expected = token_coefficients(name, **keywords)
    torch.testing.assert_close(keywords["logprobs"].grad, -expected / 40, rtol=1e-12, atol=0)
    assert float(loss.detach()) == pytest.approx(float(-(expected * keywords["logprobs"].detach()).sum() / 40))


@pytest.mark.parametrize("name", ["respo", "grpo", "proximal_kl"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up_to_the_whole(name, aggregation):
    """Sums over any split, divided by the global count, equal one call; and equal the definition of the aggregation."""
    batch = random_batch(1, LENGTHS)
    whole = with_gradient(batch.keywords())
    count = aggregation_count(aggregation, batch.cu_seqlens)
    loss, _, metrics = policy_loss(name, **whole, aggregation=aggregation, normalizer=count)
    loss.backward()
    parts = [batch.select([0, 1]), batch.select([2]), batch.select([3, 4])]
    results = [(with_gradient(p.keywords()), aggregation_count(aggregation, p.cu_seqlens)) for p in parts]
    pieces = [policy_loss(name, **k, aggregation=aggregation, normalizer=count) for k, _ in results]
    sum(piece[0] for piece in pieces).backward()
    assert sum(int(n) for _, n in results) == int(count)
    torch.testing.assert_close(sum(piece[0] for piece in pieces), loss)
    torch.testing.assert_close(torch.cat([k["logprobs"].grad for k, _ in results]), whole["logprobs"].grad)
    merged = finalize_metrics(merge_metrics([piece[2] for piece in pieces]))
    assert merged == pytest.approx(finalize_metrics(metrics), rel=1e-9, abs=1e-12)
    assert merged["actor/pg_loss"] == pytest.approx(float(loss.detach()))


def test_aggregations_by_definition():
    keywords = random_batch(2, LENGTHS).keywords()
    terms = -(token_coefficients("pg", **keywords) * keywords["logprobs"])
    by_response = [part for part in terms.split(LENGTHS) if len(part)]
    expected = {
        "token-mean": terms.mean(),
        "seq-mean-token-sum": torch.stack([part.sum() for part in by_response]).mean(),
        "seq-mean-token-mean": torch.stack([part.mean() for part in by_response]).mean(),
    }
    for aggregation, value in expected.items():
        loss_sum, _, _ = policy_loss("pg", **keywords, aggregation=aggregation)
        torch.testing.assert_close(loss_sum / aggregation_count(aggregation, keywords["cu_seqlens"]), value)


def test_weights_for_a_schedule_that_forms_the_sum_itself():
    """Two ranks hold different tokens of the same responses: both take their share of the weights of all tokens."""
    keywords = random_batch(3, LENGTHS).keywords()
    weights, num_tokens, _ = policy_weights("respo", **keywords, aggregation="seq-mean-token-mean")
    loss_sum, _, _ = policy_loss("respo", **keywords, aggregation="seq-mean-token-mean")
    own = torch.arange(18) % 2 == 0
    shares = [-(weights[mask] * keywords["logprobs"][mask]).sum() for mask in (own, ~own)]
    torch.testing.assert_close(sum(shares), loss_sum)
    assert int(num_tokens) == 18 and not weights.requires_grad
    assert response_weights("token-mean", torch.tensor([3])) is None


def test_half_log_probs_get_their_gradient_in_their_own_dtype():
    keywords = with_gradient(random_batch(4, LENGTHS).keywords(torch.bfloat16))
    loss, _, metrics = policy_loss("respo", **keywords)
    loss.backward()
    assert loss.dtype == torch.float32 and keywords["logprobs"].grad.dtype == torch.bfloat16
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in metrics.values())


def test_an_impossible_token_gives_no_infinite_loss():
    keywords = random_batch(5, [4, 3]).keywords()
    keywords["logprobs"][1] = -math.inf
    keywords = with_gradient(keywords)
    loss, _, metrics = policy_loss("respo", **keywords)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(keywords["logprobs"].grad).all()
    assert keywords["logprobs"].grad[1] == 0
    assert finalize_metrics(metrics)["actor/impossible_tokens"] == pytest.approx(1 / 7)


@pytest.mark.parametrize("name", available_losses())
def test_empty_micro_batch(name):
    keywords = with_gradient(random_batch(0, [0, 0]).keywords())
    loss, num_tokens, metrics = policy_loss(name, **keywords, normalizer=10)
    loss.backward()
    assert float(loss.detach()) == 0 and int(num_tokens) == 0
    full = policy_loss(name, **random_batch(0, LENGTHS).keywords())[2]
    assert metrics.keys() == full.keys()
    assert finalize_metrics(merge_metrics([metrics, full])) == finalize_metrics(full)
    assert all(math.isfinite(value) for value in finalize_metrics(metrics).values())


@pytest.mark.parametrize("key", ["logprobs", "behavior_logprobs", "reference_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_names_the_sequence_and_stops(key, value):
    keywords = random_batch(6, LENGTHS).keywords()
    keywords[key] = keywords[key].clone()
    keywords[key][3 if key == "advantages" else 8] = value
    with pytest.raises(NonFiniteLogprobError, match=rf"^{key} of sequence 3 is {value}.*stopped") as caught:
        policy_loss("grpo", **keywords)
    assert isinstance(caught.value, FloatingPointError)
    assert key == "advantages" or "at its token 2 (packed position 8)" in str(caught.value)


def test_metrics_are_fresh_tensors():
    keywords = random_batch(7, LENGTHS).keywords()
    """A schedule may divide what it is handed in place: no two metrics, and no input, share memory."""
    _, num_tokens, metrics = policy_loss("proximal_kl", **keywords)
    places = [value.data_ptr() for value in (*metrics.values(), num_tokens, *keywords.values())]
    assert len(set(places)) == len(places)
    assert num_tokens.dtype == torch.int64 and not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(2)}, "advantages has shape"),
        ({"cu_seqlens": torch.tensor([0, 5, 6, 6, 15])}, "advantages has shape"),
        ({"cu_seqlens": torch.tensor([0, 5, 6, 6, 15, 17])}, "has to rise from 0 to the 18 packed tokens"),
        ({"cu_seqlens": torch.tensor([0, 7, 6, 6, 15, 18])}, "has to rise"),
        ({"behavior_logprobs": torch.zeros(3)}, "behavior_logprobs has shape"),
        ({"behavior_logprobs": None}, "needs behavior_logprobs"),
        ({"logprobs": torch.zeros(18, dtype=torch.int64)}, "floating-point"),
        ({"aggregation": "token_mean"}, "did you mean 'token-mean'"),
        ({"normalizer": 0}, "normalizer=0 is refused"),
        ({"normalizer": float("nan")}, "normalizer=nan is refused"),
        ({"cu_seqlens": torch.tensor([0.0, 5.5, 6.0, 6.0, 18.0])}, "cu_seqlens of dtype torch.float32 are refused"),
        ({"cu_seqlens": [0, 5, 6, 6, 18]}, "cu_seqlens has type list: pass a one-dimensional tensor"),
        ({"advantages": torch.tensor(1.0)}, r"advantages has shape \(\): pass a one-dimensional tensor"),
        ({"logprobs": torch.tensor(-1.0)}, r"logprobs has shape \(\)"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(LossError, match=message):
        policy_loss("respo", **(random_batch(8, LENGTHS).keywords() | change))
