"""Weights from Megatron's shards into a live vLLM engine: three pushes, each proved by log-probs; then HF out."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tests.parallel.models import load_transformers, rollout_batch, token_logprobs, write_model
from tests.ranks import run_ranks

LAYOUTS = {
    "one": {},
    "tp2": {"tensor_parallel": 2},
    "pp2_vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def refreshed(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    model = write_model(root / "model", tied=request.param == "tp2")
    batch = rollout_batch(model)
    with open(root / "batch.pickle", "wb") as file:
        pickle.dump(batch, file)
    actor = {"dtype": "float32", "micro_batch_tokens": 200, **LAYOUTS[request.param]}
    config = {
        "run_dir": str(root),
        "model": {"path": str(model)},
        "data": {"train": "unused", "max_prompt_length": 32},
        "rollout": {"precision": "float32", "max_response_length": 32, "kv_cache_gb": 0.1},
        "actor": actor,
        "optimizer": {"lr": 1e-2, "warmup_fraction": 0.0},
    }
    job = {"config": config, "batch": str(root / "batch.pickle"), "output": str(root)}
    (root / "job.json").write_text(json.dumps(job))
    world_size = actor.get("tensor_parallel", 1) * actor.get("pipeline_parallel", 1)
    run_ranks("tests.e2e.refresh_worker", world_size, str(root / "job.json"), log_dir=root / "logs")
    return root, model, batch, json.loads((root / "result.json").read_text())


def test_engine_equals_trainer_after_each_of_three_refreshes(refreshed):
    gaps = refreshed[3]["gaps"]
    assert gaps["start"] < 1e-4
    for update in (1, 2, 3):
        assert gaps[f"stale {update}"] > 1e-2, "the update must move the log-probs, or the test proves nothing"
        assert gaps[f"fresh {update}"] < 1e-4


def test_every_push_is_certified_whole_and_published_once(refreshed):
    _, path, _, result = refreshed
    weights = sum(p.numel() for p in load_transformers(path).parameters())
    for version, certificate in enumerate(result["certificates"], start=1):
        assert certificate["rollout/weight_version"] == version
        assert certificate["refresh/bytes"] == 4 * weights
    assert result["version"] == 3


def test_written_model_loads_in_transformers_with_the_names_and_shapes_of_the_source(refreshed):
    from safetensors import safe_open

    root, path, batch, _ = refreshed
    with (
        safe_open(path / "model.safetensors", "pt") as source,
        safe_open(root / "saved/model.safetensors", "pt") as out,
    ):
        assert {n: source.get_slice(n).get_shape() for n in source.keys()} == {  # noqa: SIM118
            n: out.get_slice(n).get_shape()
            for n in out.keys()  # noqa: SIM118
        }
    before, after = load_transformers(path), load_transformers(root / "saved")
    with torch.no_grad():
        moved = [(token_logprobs(after, t.token_ids) - token_logprobs(before, t.token_ids)).abs().max() for t in batch]
    assert max(moved) > 1e-2
