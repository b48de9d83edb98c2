"""The same rollout batch in every layout: loss, metrics, gradient norm, every gradient, weights after the update."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rlvr.actor.context import shard
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.losses import available_losses
from tests.parallel.compare import gradients, named_gradients, worst_relative
from tests.parallel.matrix import FEW_TOKENS, LAYOUTS, LOSSES, load_batch
from tests.parallel.models import load_transformers, token_logprobs

OTHERS = [name for group in LAYOUTS.values() for name in group if name != "one"]
# Relative to the loss. vespo's W^2 doubles the rounding of log W; in gspo terms cancel to a twentieth of their size.
LOSS_TOLERANCE = {"vespo": 3e-6, "gspo": 3e-6}


@pytest.fixture(scope="module")
def results(matrix):
    return {path.stem: json.loads(path.read_text()) for path in (matrix.layouts / "results").glob("*.json")}


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_makes_the_update_of_one_rank(matrix, results, name):
    one, other = results["one"], results[name]
    for key in LOSSES:
        expected = pytest.approx(one["losses"][key]["actor/pg_loss"], rel=LOSS_TOLERANCE.get(key, 1e-6), abs=0)
        assert other["losses"][key]["actor/pg_loss"] == expected, key
    if name != "dp2_distributed_optimizer":  # its gradients live in shards of the flat buffer
        assert other["gradient_errors"].keys() == LOSSES.keys()
        assert max(other["gradient_errors"].values()) < 1e-5
        gathered = gradients(matrix.layouts, name, "respo")
        assert worst_relative(gathered, gradients(matrix.layouts, "one", "respo")) < 1e-5
    assert other["step"]["actor/grad_norm"] == pytest.approx(one["step"]["actor/grad_norm"], rel=1e-5)
    assert other["spread"] == 0.0


@pytest.mark.parametrize("name", OTHERS)
def test_metrics_do_not_depend_on_the_layout(results, name):
    for key in LOSSES:
        one, other = results["one"]["losses"][key], results[name]["losses"][key]
        assert one.keys() == other.keys()
        for metric, value in one.items():
            assert other[metric] == pytest.approx(value, rel=1e-4, abs=1e-8), (key, metric)


@pytest.mark.parametrize("name", OTHERS)
def test_every_token_has_the_log_prob_of_one_rank(results, name):
    """Also at the boundaries of context-parallel chunks, where labels shifted after the split would be wrong."""
    one, other = results["one"]["logprobs"], results[name]["logprobs"]
    assert one.keys() == other.keys()
    for ids, expected in one.items():
        for place, (found, wanted) in enumerate(zip(other[ids], expected, strict=True)):
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6), f"token {place} of the response {ids}"


def test_every_loss_is_covered_and_every_clip_cuts_a_part(results):
    assert {loss["name"] for loss in LOSSES.values()} == set(available_losses())
    metrics = results["one"]["losses"]
    for key in ("grpo_decoupled", "gspo", "cispo"):
        assert 0 < metrics[key]["actor/pg_clipfrac"] < 1, key
    for key in ("proximal_kl", "proximal_kl_horizon"):
        assert 0 < metrics[key]["proximal_kl/saturated"] < 1, key
    assert metrics["proximal_kl"]["actor/pg_loss"] != metrics["proximal_kl_horizon"]["actor/pg_loss"]


@pytest.mark.parametrize(("size", "sequence_multiple"), [(2, 4), (4, 8)])
def test_the_batch_tries_context_parallel_boundaries(matrix, size, sequence_multiple):
    """Odd lengths, responses that cross chunks, and a rank without a response token in its micro-batch."""
    trajectories = load_batch(matrix.layouts)
    fed = [t.num_tokens - 1 for t in trajectories]
    assert sum(length % 2 for length in fed) >= 4 and sum(length % (2 * size) != 0 for length in fed) >= 8
    assert ActorConfig(context_parallel=size).sequence_multiple == sequence_multiple
    mini_batch = build_mini_batch(
        trajectories,
        data_parallel_size=1,
        data_parallel_rank=0,
        micro_batch_tokens=FEW_TOKENS,
        layout="packed",
        pad_to_multiple=sequence_multiple,
        sequence_multiple=sequence_multiple,
    )
    held = [[len(shard(b, size, rank).slots) for rank in range(size)] for b in mini_batch.micro_batches]
    assert any(0 in counts and sum(counts) > 0 for counts in held)
    assert sum(all(counts) for counts in held) >= 3


def test_distributed_optimizer_reaches_the_weights_of_the_plain_one(matrix):
    plain = load_file(matrix.layouts / "dp2.weights.safetensors")
    sharded = load_file(matrix.layouts / "dp2_distributed_optimizer.weights.safetensors")
    assert max((plain[n] - sharded[n]).abs().max().item() for n in plain) < 1e-6


def test_one_rank_makes_the_update_of_transformers(matrix, results):
    """ReSPO's coefficients written out (SPEC 2) on autograd through transformers' own model."""
    model = load_transformers(matrix.layouts / "model")
    batch = load_batch(matrix.layouts)
    total, tokens = torch.zeros(()), sum(t.response_length for t in batch)
    for t in batch:
        logprobs = token_logprobs(model, t.token_ids)[t.action_mask[1:]]
        log_w = float((logprobs.detach().double() - torch.from_numpy(t.behavior_logprobs[t.action_mask])).sum())
        if t.advantage >= 0:
            phi = (1 + np.exp(log_w)) / 2 * np.exp(1 - np.exp(log_w))
        else:
            phi = np.exp(0.5 * log_w + 2 * (1 - np.exp(0.5 * log_w)))
        total = total - phi * t.advantage * logprobs.sum()
    (total / tokens).backward()
    assert results["one"]["losses"]["respo"]["actor/pg_loss"] == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    assert worst_relative(gradients(matrix.layouts, "one", "respo"), named_gradients(model)) < 1e-5
