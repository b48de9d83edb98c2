"""The rotary position embedding that config.json asks for, with every parameter made explicit.

Both places are read: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before). Defaults are
those of transformers' modeling_rope_utils: beta_fast 32, beta_slow 1, truncate true, original_max_position_embeddings
from max_position_embeddings, YaRN's attention factor 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.types import UserError

RopeScaling = tuple[tuple[str, object], ...]

_COMMON = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_LLAMA3 = frozenset(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_YARN = frozenset(("factor", "original_max_position_embeddings", *_YARN_OPTIONS))


def read_rope(config: ConfigJson) -> tuple[float, RopeScaling]:
    """(rope_theta, parameters of the variant sorted by name; empty for default RoPE).

    Raises UserError for a variant, parameter or value that cannot be served, naming it.
    """
    rope = _Rope(config, _parameters(config))
    theta = rope.number("rope_theta", config.get("rope_theta", 10000.0), above=0)
    if rope.type == "default":
        rope.allow(frozenset())
        return theta, ()
    scaling = _llama3(rope) if rope.type == "llama3" else _yarn(rope)
    return theta, tuple(sorted({"rope_type": rope.type, **scaling}.items()))


class _Rope:
    """The parameters with refusals that name file, parameter and value."""

    def __init__(self, config: ConfigJson, values: Mapping[str, Any]) -> None:
        self.config, self.values = config, values
        self.type = values.get("rope_type", values.get("type", "default"))
        if self.type not in ("default", "llama3", "yarn"):
            raise self.refuse("rope_type", self.type, "use default, llama3 or yarn")
        if self.number("partial_rotary_factor", config.get("partial_rotary_factor", 1.0), above=0) != 1:
            raise self.refuse("partial_rotary_factor", "below 1", "whole heads are rotated")

    def allow(self, own: frozenset[str]) -> None:
        """Refuse parameters that the variant does not have: ignored, they would make another model."""
        for key in sorted(set(self.values) - _COMMON - own):
            raise self.refuse(key, self.values[key], f"{self.type} RoPE has no such parameter")

    def number(self, key: str, default: float | None = None, *, above: float) -> float:
        """A finite number greater than `above`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < math.inf:
            raise self.refuse(key, value, f"it must be a number above {above:g}")
        return float(value)

    def original_length(self) -> int:
        """Positions the model was first trained on."""
        beside = self.config.get("original_max_position_embeddings")
        inside = self.values.get("original_max_position_embeddings")
        value = beside or inside or self.config.integer("max_position_embeddings")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse("original_max_position_embeddings", value, "it must be a positive integer")
        return value

    def refuse(self, key: str, value: object, why: str) -> UserError:
        return UserError(f"{self.config.path}: RoPE {key} {value!r} is not supported: {why}.")


def _parameters(config: ConfigJson) -> Mapping[str, Any]:
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise config.refuse(key, "the RoPE parameters must be a JSON object")
    if old and new and old != new:
        raise config.refuse("rope_scaling", "rope_parameters says something else; keep one of the two")
    return old or new or {}


def _llama3(rope: _Rope) -> dict[str, object]:
    rope.allow(_LLAMA3)
    low, high = (rope.number(f"{band}_freq_factor", above=0) for band in ("low", "high"))
    if low >= high:
        raise rope.refuse("high_freq_factor", high, f"it must be above low_freq_factor {low:g}")
    return {
        "factor": rope.number("factor", above=0),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": rope.original_length(),
    }


def _yarn(rope: _Rope) -> dict[str, object]:
    rope.allow(_YARN)
    fast, slow = rope.number("beta_fast", 32.0, above=0), rope.number("beta_slow", 1.0, above=0)
    if slow >= fast:
        raise rope.refuse("beta_fast", fast, f"it must be above beta_slow {slow:g}")
    truncate = rope.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise rope.refuse("truncate", truncate, "it must be true or false")
    factor = rope.number("factor", above=0)
    return {
        "factor": factor,
        "original_max_position_embeddings": rope.original_length(),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
        "attention_factor": rope.number("attention_factor", _attention_factor(rope, factor), above=0),
    }


def _attention_factor(rope: _Rope, factor: float) -> float:
    """What cosines and sines are multiplied by; `mscale` and `mscale_all_dim` count only where both are given."""
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        scale, all_dim = rope.number("mscale", above=0), rope.number("mscale_all_dim", above=0)
        return _concentration(factor, scale) / _concentration(factor, all_dim)
    return _concentration(factor, 1.0)


def _concentration(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
