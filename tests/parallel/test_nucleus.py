"""Top-p and top-k scoring in layouts: the truncated softmax of one rank, with its gradients, wherever a token lies."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.parallel.compare import gradients, worst_relative
from tests.parallel.matrix import NUCLEUS, NUCLEUS_LAYOUTS, load_batch
from tests.parallel.models import load_transformers

OTHERS = [name for group in NUCLEUS_LAYOUTS.values() for name in group if name != "one"]


@pytest.fixture(scope="module")
def results(matrix):
    return {path.stem: json.loads(path.read_text()) for path in (matrix.nucleus / "results").glob("*.json")}


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_scores_and_learns_as_one_rank(matrix, results, name):
    one, other = results["one"]["logprobs"], results[name]["logprobs"]
    assert one.keys() == other.keys()
    for ids, expected in one.items():
        np.testing.assert_allclose(other[ids], expected, rtol=1e-6, atol=1e-6)
    assert worst_relative(gradients(matrix.nucleus, name, "pg"), gradients(matrix.nucleus, "one", "pg")) < 1e-5


def test_one_rank_scores_as_transformers_logits_truncated(matrix, results):
    model = load_transformers(matrix.nucleus / "model")
    for trajectory in load_batch(matrix.nucleus):
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].double() / NUCLEUS["rollout"]["temperature"]
        places = np.flatnonzero(trajectory.action_mask[1:])
        expected = [truncated_logprob(logits[place], int(ids[place + 1])) for place in places]
        found = results["one"]["logprobs"][str(ids[1:][places].tolist())]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def truncated_logprob(logits: torch.Tensor, label: int) -> float:
    """The best top_k ids, of those the smallest set with mass top_p, and the label in any case."""
    order = logits.argsort(descending=True)[: NUCLEUS["rollout"]["top_k"]]
    mass = logits[order].softmax(0).cumsum(0)
    kept = order[: int((mass < NUCLEUS["rollout"]["top_p"]).sum()) + 1].tolist()
    return float(logits[label] - logits[list({*kept, label})].logsumexp(0))
