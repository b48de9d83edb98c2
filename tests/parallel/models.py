"""A tiny Qwen3-MoE with weights spread enough for sharp routing, and one rollout batch for it, made by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_rlvr.types import Trajectory

EOS = 3
VOCAB = 131  # odd: every tensor-parallel size has to pad it


def write_model(path: Path, seed: int = 0, *, tied: bool = False, dense_layers: tuple[int, ...] = ()) -> Path:
    """Save a 4-layer, 8-expert, top-2 model under `path`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=list(dense_layers),
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        eos_token_id=EOS,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if "gate.weight" in name else 0.08))
    model.save_pretrained(path)
    return path


def load_transformers(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def token_logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """[N-1] log-prob of each token given the ones before it."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None]).squeeze(1)


def rollout_batch(
    path: Path, seed: int = 1, count: int = 12, lack: int | None = None, extra: Sequence[tuple[int, int]] = ()
) -> list[Trajectory]:
    """Random responses of odd and even lengths; behaviour log-probs lie around the model's own, as after an update.

    lack       how many tokens every sequence lacks to a multiple of 4, where it is given: context parallelism then pads
               all of them alike and shares them out as other layouts do
    extra      (prompt, response) lengths of further trajectories
    """
    rng = np.random.default_rng(seed)
    model = load_transformers(path)
    batch = []
    for index in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 30))
        if lack is not None:
            response += -(prompt + response - 1 + lack) % 4
        batch.append(_trajectory(model, rng, index, prompt, response))
    return [*batch, *(_trajectory(model, rng, count + i, *lengths) for i, lengths in enumerate(extra))]


@torch.no_grad()
def _trajectory(model: torch.nn.Module, rng: np.random.Generator, index: int, prompt: int, response: int) -> Trajectory:
    ids = rng.integers(0, VOCAB, prompt + response).astype(np.int32)
    mask = np.arange(len(ids)) >= prompt
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[1:] = token_logprobs(model, ids).numpy() + 0.1 * rng.standard_normal(len(ids) - 1)
    return Trajectory(
        token_ids=ids,
        action_mask=mask,
        behavior_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="length",
        advantage=[1.1, 0.6, -0.2, 0.9][index % 4],
    )
