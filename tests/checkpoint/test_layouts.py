"""TP2 x PP2 -> TP2 x EP2, distributed optimizer -> EP2 x DP4: every bit arrives, across expert parallelism too."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlvr.checkpoint.manifest import read_manifest
from tests.parallel.models import write_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved")
    write_model(folder / "model", dense_layers=(1,))
    run_ranks("tests.checkpoint.layout_worker", 4, str(folder), log_dir=folder / "logs")
    return folder


def test_weights_masters_moments_and_reference_are_the_same_bits_in_the_last_layout(moved):
    saved, found = load_file(moved / "tp2_pp2.safetensors"), load_file(moved / "ep2_dp4.safetensors")
    assert saved.keys() == found.keys()
    different = [name for name in saved if not torch.equal(saved[name], found[name])]
    assert not different
    assert saved["steps"].tolist() == [2.0]
    experts = "model.layers.2.mlp.experts.5.gate_proj.weight"
    for kind in ("exp_avg", "exp_avg_sq"):
        assert saved[f"{kind}/{experts}"].abs().max() > 0, "the experts must have moments, or the test proves nothing"
    assert not torch.equal(saved[f"master/{experts}"], saved[f"weight/{experts}"])
    assert not torch.equal(saved[f"reference/{experts}"], saved[f"weight/{experts}"])


def test_version_reference_schedule_and_the_next_gradient_go_on(moved):
    results = json.loads((moved / "results.json").read_text())
    first = results["tp2_pp2"]
    assert (first["version"], first["reference_version"]) == (2, 1)
    assert first["lr"] == pytest.approx(1e-3 * 2 / 5)
    assert len(results) == 3
    for name in results:
        norm = results[name].pop("next_grad_norm")
        assert norm == pytest.approx(first.get("next_grad_norm", norm), rel=0.02)  # bf16: layouts differ by roundings
        if name == "tp2_pp2":
            first["next_grad_norm"] = norm
            continue
        assert results[name] == {key: first[key] for key in results[name]}


def test_the_manifest_names_layout_versions_and_whole_tensors(moved):
    first = read_manifest(moved / "tp2_pp2/checkpoints/step_000002")
    second = read_manifest(moved / "tp2_ep2_distributed_optimizer/checkpoints/step_000002")
    assert first.layout["pipeline_parallel"] == 2 and second.layout["expert_parallel"] == 2
    assert first.tensors.keys() == second.tensors.keys()
    key = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    assert first.tensors[key].shape == (8, 64, 64) and first.tensors[key].dtype == "bfloat16"
    assert first.tensors[f"optimizer.state.exp_avg.{key}"].dtype == "float32"
    # as Transformer Engine's layers name them: the norm before experts stands apart, that before a dense MLP does not
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in first.tensors
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in first.tensors
    assert "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight" in first.tensors
    assert first.tensors["embedding.word_embeddings.weight"].shape == (132, 64)  # padded to its two tensor ranks
    assert (moved / "tp2_pp2/checkpoints/latest").read_text() == "step_000002\n"
