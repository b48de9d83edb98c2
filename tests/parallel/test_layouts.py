"""The same rollout batch in every layout: loss, metrics, gradient norm, every gradient, weights after the update."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.models import load_transformers, rollout_batch, token_logprobs, write_model
from tests.ranks import run_ranks

LAYOUTS = {
    1: {
        "one": {},
        "padded": {"batch_layout": "padded"},
        "small_micro_batches": {"micro_batch_tokens": 40},
        "recompute": {"recompute": "full"},
    },
    2: {
        "tp2": {"tensor_parallel": 2},
        "tp2_padded": {"tensor_parallel": 2, "batch_layout": "padded"},
        "pp2": {"pipeline_parallel": 2},
        "pp2_vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
        "ep2": {"expert_parallel": 2, "data_parallel": 2},
        "dp2": {"data_parallel": 2},
        "dp2_distributed_optimizer": {"data_parallel": 2, "distributed_optimizer": True},
        "cp2": {"context_parallel": 2},
        "cp2_padded": {"context_parallel": 2, "batch_layout": "padded"},
    },
    4: {
        "tp2_pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
        "tp2_ep2": {"tensor_parallel": 2, "expert_parallel": 2, "data_parallel": 2},
        "cp2_tp2_ep2": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
        "cp2_pp2": {"context_parallel": 2, "pipeline_parallel": 2},
    },
}
LOSSES = [
    {"name": "respo"},
    {"name": "grpo"},
    {"name": "grpo", "aggregation": "seq-mean-token-mean"},
    {"name": "gspo", "aggregation": "seq-mean-token-mean"},
    {"name": "vespo", "aggregation": "seq-mean-token-sum"},
    {"name": "cispo"},
    {"name": "pg"},
    {"name": "proximal_kl", "hyperparameters": {"horizon": 8, "tail_decay": True}},
    {"name": "sft"},
]
KEYS = [f"{loss['name']}-{loss.get('aggregation', 'token-mean')}" for loss in LOSSES]
OTHERS = [name for group in LAYOUTS.values() for name in group if name != "one"]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    model = write_model(root / "model", dense_layers=(1,))
    batch = rollout_batch(model)
    with open(root / "batch.pickle", "wb") as file:
        pickle.dump(batch, file)
    return root, model, batch


@pytest.fixture(scope="module")
def results(setting):
    root, model, _ = setting
    actor = {"dtype": "float32", "micro_batch_tokens": 100}
    config = {"run_dir": str(root), "model": {"path": str(model)}, "data": {"train": "unused"}, "actor": actor}
    config["optimizer"] = {"lr": 1e-3}
    for world_size, layouts in LAYOUTS.items():
        job = {"config": config, "batch": str(root / "batch.pickle"), "output": str(root), "losses": LOSSES}
        path = root / f"job{world_size}.json"
        path.write_text(json.dumps({**job, "layouts": layouts}))
        run_ranks("tests.parallel.update_worker", world_size, str(path), log_dir=root / f"logs{world_size}")
    return {name: json.loads((root / f"{name}.json").read_text()) for group in LAYOUTS.values() for name in group}


def gradients(root, name, key):
    return load_file(root / f"{name}.{key}.gradients.safetensors")


def worst_relative(found, expected):
    """Largest difference of any tensor, relative to that tensor's largest value."""
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_makes_the_update_of_one_rank(setting, results, name):
    root, _, _ = setting
    one, other = results["one"], results[name]
    for key in KEYS:
        # vespo's W^2 doubles the rounding of log W; in gspo terms of size 1 cancel
        tolerance = 3e-6 if key.startswith("vespo") else 1e-6
        expected = pytest.approx(one["losses"][key]["actor/pg_loss"], rel=tolerance, abs=1e-6)
        assert other["losses"][key]["actor/pg_loss"] == expected, key
        if name != "dp2_distributed_optimizer":  # its gradients live in shards of the flat buffer
            assert worst_relative(gradients(root, name, key), gradients(root, "one", key)) < 1e-5
    assert other["step"]["actor/grad_norm"] == pytest.approx(one["step"]["actor/grad_norm"], rel=1e-5)
    assert other["spread"] == 0.0


@pytest.mark.parametrize("name", OTHERS)
def test_metrics_do_not_depend_on_the_layout(results, name):
    for key in KEYS:
        one, other = results["one"]["losses"][key], results[name]["losses"][key]
        assert one.keys() == other.keys()
        for metric, value in one.items():
            assert other[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


def test_distributed_optimizer_reaches_the_weights_of_the_plain_one(setting, results):
    root, _, _ = setting
    plain = load_file(root / "dp2.weights.safetensors")
    sharded = load_file(root / "dp2_distributed_optimizer.weights.safetensors")
    assert max((plain[n] - sharded[n]).abs().max().item() for n in plain) < 1e-6


def test_one_rank_makes_the_update_of_transformers(setting, results):
    """ReSPO's coefficients written out (SPEC 2) on autograd through transformers' own model."""
    root, path, batch = setting
    model = load_transformers(path)
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
    assert results["one"]["losses"]["respo-token-mean"]["actor/pg_loss"] == pytest.approx(
        float(total.detach()) / tokens, rel=1e-5
    )
    assert worst_relative(gradients(root, "one", "respo-token-mean"), named_gradients(model)) < 1e-5


def named_gradients(model):
    """transformers' gradients under checkpoint names: it fuses the experts of a layer in memory."""
    found = {}
    for name, weight in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(g.chunk(2, 0) for g in weight.grad):
                found[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight.grad):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            found[name] = weight.grad
    return found
