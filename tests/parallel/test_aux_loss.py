"""The experts' load-balancing loss: Switch Transformer's formula on transformers' router, the same in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.compare import gradients, named_gradients, worst_relative
from tests.parallel.matrix import AUX_COEFFICIENT, AUX_LAYOUTS, COMPARED_WITH, load_batch
from tests.parallel.models import load_transformers, token_logprobs

OTHERS = {name: layout for group in AUX_LAYOUTS.values() for name, layout in group.items()}


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - set(COMPARED_WITH)))
def test_weight_does_not_depend_on_the_layout(matrix, name):
    expected = gradients(matrix.aux, "two_micro_batches" if "data_parallel" in OTHERS[name] else "one", "pg")
    assert worst_relative(gradients(matrix.aux, name, "pg"), expected) < 1e-5


def test_gradient_is_that_of_the_formula_on_transformers(matrix):
    batch = load_batch(matrix.aux)
    model = load_transformers(matrix.aux / "model")
    total, logits = torch.zeros(()), []
    for t in batch:
        logprobs = token_logprobs(model, t.token_ids)[t.action_mask[1:]]
        weights = (logprobs.detach() - torch.from_numpy(t.behavior_logprobs[t.action_mask])).exp() * t.advantage
        total = total - (weights * logprobs).sum()
        ids = torch.from_numpy(t.token_ids[:-1].astype("int64"))[None]
        logits.append(model(ids, output_router_logits=True).router_logits)
    auxiliary = sum(load_balancing(torch.cat(layer)) for layer in zip(*logits, strict=True))
    (total / sum(t.response_length for t in batch) + AUX_COEFFICIENT * auxiliary).backward()
    assert worst_relative(gradients(matrix.aux, "one", "pg"), named_gradients(model)) < 1e-5


def load_balancing(logits):
    """experts * sum_i f_i P_i of one layer [T, experts]: f the share of routed tokens, P the mean probability."""
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
