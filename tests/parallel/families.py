"""A tiny random model of every family that `matrix` does not have, with the RoPE variants, in layouts of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.parallel.compare import named_gradients
from tests.parallel.matrix import load_batch, write_jobs
from tests.parallel.models import EOS, VOCAB, load_transformers, token_logprobs
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
# The original lengths lie within those of the test's sequences, so that every band of frequencies turns differently.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "llama_llama3": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3},
    "llama_biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": YARN | {"attention_factor": 0.8, "truncate": False},
    },
    "qwen3_biased": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "qwen3_moe_biased": {"model_type": "qwen3_moe", "attention_bias": True, "head_dim": 16, **EXPERTS},
}
_SPLIT: dict[str, dict[str, Any]] = {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}}
_DENSE: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": 2},  # each rank holds the whole model
    "cp2": {"context_parallel": 2},
}
LAYOUTS = {
    name: _SPLIT | ({"ep2": {"expert_parallel": 2, "data_parallel": 2}} if "num_experts" in config else _DENSE)
    for name, config in MODELS.items()
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
LOSS = "sft"


def run_families(root: Path) -> dict[str, Path]:
    """One launch: folders with a model, a batch, the gradients of transformers and what every layout made of it."""
    folders = {name: root / name for name in MODELS}
    for name, folder in folders.items():
        write_family(folder / "model", MODELS[name])
        write_jobs(folder, {2: LAYOUTS[name]}, {LOSS: {"name": LOSS}}, {"micro_batch_tokens": 130}, count=6)
        save_file(reference_gradients(folder), folder / f"one.{LOSS}.gradients.safetensors")
    jobs = [str(folder / "job2.json") for folder in folders.values()]
    run_ranks("tests.parallel.update_worker", 2, *jobs, log_dir=root / "logs")
    return folders


def write_family(path: Path, config: dict[str, Any]) -> Path:
    """Save a random model whose biases and norms are as far from 0 and 1 as its weights are large."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | config)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if "gate.weight" in name else 0.12))
    model.save_pretrained(path)
    return path


def reference_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Of the mean negative log-likelihood of the batch's responses, by autograd through transformers' model."""
    model, batch = load_transformers(folder / "model"), load_batch(folder)
    total = sum(token_logprobs(model, t.token_ids)[t.action_mask[1:]].sum() for t in batch)
    (-total / sum(t.response_length for t in batch)).backward()
    return named_gradients(model)
