"""V(H) of groups that no rank and no micro-batch holds whole, against transformers' log-probs and plain statistics."""

from __future__ import annotations

import json
import pickle
import statistics

import numpy as np
import pytest
import torch

from tests.parallel.models import load_transformers, rollout_batch, token_logprobs, write_model
from tests.ranks import run_ranks

LAYOUTS = {"dp2": {"data_parallel": 2}, "pp2": {"pipeline_parallel": 2}, "cp2": {"context_parallel": 2}}
GROUPS = [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]  # a response alone has no variance
HORIZONS = [1, 4, "full"]
BETA, BOUND = 0.2, 0.08


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(trajectories, expected V by horizon, metrics by rank and layout)"""
    root = tmp_path_factory.mktemp("variance")
    model = write_model(root / "model")
    batch = rollout_batch(model, count=len(GROUPS))
    with open(root / "batch.pickle", "wb") as file:
        pickle.dump(batch, file)
    config = {
        "run_dir": str(root),
        "model": {"path": str(model)},
        "data": {},
        "loss": {
            "name": "proximal_kl",
            "hyperparameters": {"beta": BETA, "cost_clip": BOUND, "horizon": 8},
            "variance_horizons": HORIZONS,
        },
        "actor": {"dtype": "float32", "micro_batch_tokens": 48},
    }
    job = {"config": config, "batch": str(root / "batch.pickle"), "output": str(root), "groups": GROUPS}
    (root / "job.json").write_text(json.dumps({**job, "layouts": LAYOUTS}))
    run_ranks("tests.parallel.variance_worker", 2, str(root / "job.json"), log_dir=root / "logs")
    ranks = [json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return expected_variances(load_transformers(model), batch), ranks


@torch.no_grad()
def expected_variances(model, batch):
    """Eq. C.4-C.5 with the statistics module."""
    costs = []
    for t in batch:
        reference = t.behavior_logprobs[t.action_mask] + 0.05 * np.sin(t.token_ids[t.action_mask].astype(np.float32))
        gap = token_logprobs(model, t.token_ids).numpy()[t.action_mask[1:]] - reference
        costs.append(np.clip(gap.astype(np.float64), -BOUND, BOUND))
    found = {}
    for horizon in HORIZONS:
        first = [BETA * float(c[: len(c) if horizon == "full" else horizon].sum()) for c in costs]
        groups = [[x for x, owner in zip(first, GROUPS, strict=True) if owner == g] for g in (0, 2, 3)]
        found[horizon] = statistics.fmean(statistics.variance(group) for group in groups)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_variance_is_that_of_whole_groups_on_every_rank(measured, layout, rank):
    expected, ranks = measured
    metrics = ranks[rank][layout]
    assert metrics["micro_batches"] >= 2  # on each rank: the largest group fits none of them
    for horizon, variance in expected.items():
        assert variance > 1e-5
        assert metrics[f"proximal_kl/variance/H={horizon}"] == pytest.approx(variance, rel=1e-4)
