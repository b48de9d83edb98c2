"""The model, the batch and the configs of the device check, the same numbers on every machine.

Nothing here is drawn on the device under test, or by a generator whose stream may change between releases: numpy's
RandomState is frozen.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arithmetic import make_demonstrations, make_problems
from make_tiny_model import build_tokenizer
from safetensors.torch import save_file

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.hf import WeightMap, read_model_spec
from megatron_rlvr.types import MiniBatch, Trajectory

VOCABULARY = 128  # rows beyond the tokenizer's are never seen in text
RESPONSES = 12
GROUP_SIZE = 8
TERMS = (2, 3)  # numbers to add in the problems of the learning check

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def write_model(path: Path) -> float:
    """Write the tiny Qwen3-MoE as a Hugging Face directory; the sum of all its weights' magnitudes, in float64."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    build_tokenizer().save_pretrained(path)
    shapes = WeightMap(read_model_spec(path)).hf_shapes()
    tensors = {name: torch.from_numpy(_weight(name, shape)) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.double().abs().sum().item() for tensor in tensors.values())


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, seeded by its name: the order and the grouping of tensors do not matter."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.1 * draw).astype(np.float32)
    scale = 0.5 if "embed_tokens" in name else shape[-1] ** -0.5
    return (scale * draw).astype(np.float32)


def write_task(path: Path) -> None:
    """Problems to train on and partly wrong demonstrations; what is learned is checked on the problems themselves."""
    path.mkdir(parents=True)
    problems = make_problems(64, 1, min_terms=TERMS[0], max_terms=TERMS[1])
    demonstrations = make_demonstrations(4096, 2, 0.5, min_terms=TERMS[0], max_terms=TERMS[1])
    for name, rows in (("train", problems), ("demonstrations", demonstrations)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def mini_batch(micro_batch_tokens: int = 96) -> MiniBatch:
    """Packed micro-batches of random responses whose sampler is near, but not at, the untrained model."""
    draw = np.random.RandomState(7)
    return build_mini_batch(
        [_trajectory(draw) for _ in range(RESPONSES)],
        data_parallel_size=1,
        data_parallel_rank=0,
        micro_batch_tokens=micro_batch_tokens,
        layout="packed",
    )


def _trajectory(draw: np.random.RandomState) -> Trajectory:
    before, length = draw.randint(2, 9), draw.randint(1, 17)
    total = before + length
    mask = np.arange(total) >= before
    return Trajectory(
        token_ids=draw.randint(0, VOCABULARY, total).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -5.3 + 0.2 * draw.standard_normal(total), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="stop",
        advantage=float(draw.standard_normal()),
    )


def run_config(work: Path, name: str, *, updates: int, sft_updates: int, model: Path | None = None) -> RunConfig:
    """A run on one rank in float32 with the transformers engine, under `work`."""
    return RunConfig.model_validate(
        {
            "name": name,
            "run_dir": work / name,
            "model": {"path": model or work / "model"},
            "data": {"train": work / "task" / "train.jsonl", "max_prompt_length": 8},
            "rollout": {
                "engine": "transformers",
                "precision": "float32",
                "group_size": GROUP_SIZE,
                "max_response_length": 16,
            },
            "actor": {"dtype": "float32", "micro_batch_tokens": 4096},
            "optimizer": {"lr": 1e-3, "warmup_fraction": 0.0, "weight_decay": 0.0},
            # Tied experts make single tokens differ by any amount: the check looks at the median update itself.
            "trainer": {"updates": updates, "mini_batch_size": 16, "step_zero_tolerance": 100.0},
            "logging": {"progress": False, "rollouts": False},
            "sft": {
                "demonstrations": work / "task" / "demonstrations.jsonl",
                "updates": sft_updates,
                "batch_size": 64,
                "lr": 5e-3,
                "output": work / "warm",
            },
        }
    )
