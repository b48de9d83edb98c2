"""Rotary frequencies and attention scale of every RoPE variant, as transformers computes them.

megatron-core's own llama3 option fixes all parameters but the factor, and its YaRN lives in another embedding class
whose fused kernel drops the attention factor for packed sequences. So the built model is given the frequencies made
here, and the attention factor, which multiplies rotated q and k alike, goes into the softmax scale as its square.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_rlvr.types import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """[head_dim/2] float32, radians per position.

    Base frequencies: Su et al. 2021, section 3.2.2. llama3: Llama 3.1's three bands (transformers
    modeling_rope_utils). yarn: Peng et al. 2023, equations 17 to 19 ("NTK-by-parts").

    Raises ValueError for a variant that there is no formula for.
    """
    # In float32 like transformers and vLLM: at position 40,000 the last bit of a fast frequency is 0.002 radians.
    base = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    if not spec.rope_scaling:
        return base
    parameters: dict[str, Any] = dict(spec.rope_scaling)
    bands = {"llama3": _llama3_unscaled_share, "yarn": _yarn_unscaled_share}
    if parameters["rope_type"] not in bands:
        raise ValueError(f"no formula for rope_type {parameters['rope_type']!r}")
    unscaled = bands[parameters["rope_type"]](base, spec, parameters)
    return base / parameters["factor"] * (1 - unscaled) + base * unscaled


def softmax_scale(spec: ModelSpec) -> float | None:
    """What q k^T is multiplied by: the attention factor squared over sqrt(head_dim); None where there is no factor."""
    factor = dict(spec.rope_scaling).get("attention_factor", 1.0)
    assert isinstance(factor, float)
    return None if factor == 1.0 else factor**2 / math.sqrt(spec.head_dim)


def _llama3_unscaled_share(base: torch.Tensor, spec: ModelSpec, parameters: dict[str, Any]) -> torch.Tensor:
    """1 where a wave turns `high_freq_factor` times within the original context, 0 below `low_freq_factor` turns."""
    turns = parameters["original_max_position_embeddings"] / (2 * math.pi / base)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_unscaled_share(base: torch.Tensor, spec: ModelSpec, parameters: dict[str, Any]) -> torch.Tensor:
    """1 down to the pair that turns `beta_fast` times within the original context, 0 from `beta_slow` turns on."""

    def pair(turns: float) -> float:
        wavelength = parameters["original_max_position_embeddings"] / turns
        return spec.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.rope_theta))

    first, last = pair(parameters["beta_fast"]), pair(parameters["beta_slow"])
    if parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.head_dim - 1)
    width = last - first or 0.001  # transformers' guard where both ends meet
    return 1 - ((torch.arange(len(base), dtype=torch.float32) - first) / width).clamp(0, 1)
