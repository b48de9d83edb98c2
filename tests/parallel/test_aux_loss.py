"""The experts' load-balancing loss: Switch Transformer's formula on transformers' router, the same in every layout."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tests.parallel.models import load_transformers, rollout_batch, token_logprobs, write_model
from tests.parallel.test_layouts import gradients, named_gradients, worst_relative
from tests.ranks import run_ranks

COEFFICIENT = 0.3
ONE_MICRO_BATCH, TWO_MICRO_BATCHES = 400, 160
LAYOUTS = {
    1: {"one": {}, "two_micro_batches": {"micro_batch_tokens": TWO_MICRO_BATCHES}},
    2: {
        "tp2": {"tensor_parallel": 2},
        "cp2": {"context_parallel": 2},
        "pp2": {"pipeline_parallel": 2},
        "ep2": {"expert_parallel": 2, "data_parallel": 2, "micro_batch_tokens": TWO_MICRO_BATCHES},
    },
}
EXPECTED = {"tp2": "one", "cp2": "one", "pp2": "one", "ep2": "two_micro_batches"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("aux")
    model = write_model(root / "model")
    with open(root / "batch.pickle", "wb") as file:
        pickle.dump(rollout_batch(model, multiple=4), file)
    actor = {"dtype": "float32", "micro_batch_tokens": ONE_MICRO_BATCH, "moe_aux_loss_coeff": COEFFICIENT}
    config = {"run_dir": str(root), "model": {"path": str(model)}, "data": {"train": "unused"}, "actor": actor}
    for world_size, layouts in LAYOUTS.items():
        job = {"config": config, "batch": str(root / "batch.pickle"), "output": str(root), "losses": [{"name": "pg"}]}
        path = root / f"job{world_size}.json"
        path.write_text(json.dumps({**job, "layouts": layouts}))
        run_ranks("tests.parallel.update_worker", world_size, str(path), log_dir=root / f"logs{world_size}")
    return root


@pytest.mark.parametrize("name", EXPECTED)
def test_weight_does_not_depend_on_the_layout(root, name):
    expected = gradients(root, EXPECTED[name], "pg-token-mean")
    assert worst_relative(gradients(root, name, "pg-token-mean"), expected) < 1e-5


def test_gradient_is_that_of_the_formula_on_transformers(root):
    with open(root / "batch.pickle", "rb") as file:
        batch = pickle.load(file)
    model = load_transformers(root / "model")
    total, logits = torch.zeros(()), []
    for t in batch:
        logprobs = token_logprobs(model, t.token_ids)[t.action_mask[1:]]
        weights = (logprobs.detach() - torch.from_numpy(t.behavior_logprobs[t.action_mask])).exp() * t.advantage
        total = total - (weights * logprobs).sum()
        ids = torch.from_numpy(t.token_ids[:-1].astype("int64"))[None]
        logits.append(model(ids, output_router_logits=True).router_logits)
    auxiliary = sum(load_balancing(torch.cat(layer)) for layer in zip(*logits, strict=True))
    (total / sum(t.response_length for t in batch) + COEFFICIENT * auxiliary).backward()
    assert worst_relative(gradients(root, "one", "pg-token-mean"), named_gradients(model)) < 1e-5


def load_balancing(logits):
    """experts * sum_i f_i P_i of one layer [T, experts]: f the share of routed tokens, P the mean probability."""
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
