"""Gradients of the workers and of transformers under the same names, and how far apart two of them are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def gradients(folder: Path, layout: str, loss: str) -> dict[str, torch.Tensor]:
    """Whole gradients under Hugging Face names: all losses of layout `one`, the first loss of the others."""
    return load_file(folder / f"{layout}.{loss}.gradients.safetensors")


def worst_relative(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value (0 beside 0)."""
    assert found.keys() == expected.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and torch.isfinite(found).all()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def named_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """transformers' gradients under checkpoint names: it fuses the experts of a layer in memory."""
    found = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
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
