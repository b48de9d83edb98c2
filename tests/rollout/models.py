"""Tiny random checkpoints, and log-probs of them from plain transformers, one unpadded sequence at a time."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

VOCAB = 64
EOS = 1
MAX_MODEL_LEN = 96


def write_model(path: Path, seed: int, *, family: str = "qwen3_moe", tied: bool = False) -> Path:
    """A random model whose distributions are far from flat, so that a wrong weight shows in every log-prob."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "qwen3_moe":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, decoder_sparse_step=1, mlp_only_layers=[]))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(3)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def oracle_logprobs(path: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """[N-1] float64 per sequence, from a model that transformers has just loaded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows: list[np.ndarray] = []
    with torch.no_grad():
        for ids in sequences:
            logits = model(torch.tensor([ids])).logits[0].double()
            rows.append(logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return rows


def contexts(count: int, seed: int, *, shortest: int = 3, longest: int = 25) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCAB) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def gap(path: Path, given: list[list[int]], groups) -> float:
    """Largest difference between the completions' log-probs and the oracle's."""
    pairs = [(ids, c) for ids, group in zip(given, groups, strict=True) for c in group]
    rows = oracle_logprobs(path, [ids + c.token_ids.tolist() for ids, c in pairs])
    return max(np.abs(row[-len(c.logprobs) :] - c.logprobs).max() for row, (_, c) in zip(rows, pairs, strict=True))


def ids_of(groups) -> list[list[list[int]]]:
    return [[c.token_ids.tolist() for c in group] for group in groups]
