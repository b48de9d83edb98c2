"""What transformers computes: hidden states before, inside and after every layer, and the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rlvr.types import UserError

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
LOGITS, FREQUENCIES = "lm_head", "inv_freq"


def probe_names(num_layers: int) -> list[str]:
    """Where both models are compared, in the order of the forward pass; named after the Hugging Face modules."""
    inside = (f"model.layers.{i}{part}" for i in range(num_layers) for part in (".self_attn", ".mlp", ""))
    return ["model.embed_tokens", *inside, "model.norm", LOGITS]


@torch.no_grad()
def reference_activations(path: Path, tokens: torch.Tensor, dtype: str, device: str) -> dict[str, torch.Tensor]:
    """Float32 activations [B, S, features] of transformers on `tokens` [B, S], by probe name, and rotary frequencies.

    Raises UserError where transformers cannot load the model.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"transformers cannot load {path} ({str(error).splitlines()[0]}); check its files.") from error
    model = model.eval().to(device)
    found: dict[str, torch.Tensor] = {FREQUENCIES: model.model.rotary_emb.inv_freq.float().cpu()}
    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_hook(_keep(found, name)) for name in probe_names(len(model.model.layers))]
    model(tokens.to(device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _keep(found: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        found[name] = tensor.detach().float().cpu().contiguous()

    return hook
