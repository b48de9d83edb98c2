"""One file per model family: what its config.json leaves unsaid, and its table of name, shape and layout rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_rlvr.hf.config_json import ConfigJson
from megatron_rlvr.hf.families import llama, qwen2, qwen3, qwen3_moe
from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.types import ModelSpec, UserError

__all__ = ["FAMILIES", "Family", "Rule", "Source", "family_rules"]


@dataclass(frozen=True)
class Family:
    """A model type.

    describe   config.json -> the ModelSpec fields that only this family knows
    rules      (spec, vocab_multiple) -> every tensor, in model order
    """

    describe: Callable[[ConfigJson], dict[str, Any]]
    rules: Callable[[ModelSpec, int], Iterator[Rule]]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3": Family(qwen3.describe, qwen3.rules),
        "qwen3_moe": Family(qwen3_moe.describe, qwen3_moe.rules),
        "qwen2": Family(qwen2.describe, qwen2.rules),
        "llama": Family(llama.describe, llama.rules),
    }
)


def family_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """The rules of spec.family, in model order; UserError when there is no such table."""
    if spec.family not in FAMILIES:
        raise UserError(f"model family {spec.family!r} has no weight table; use one of {', '.join(FAMILIES)}.")
    return FAMILIES[spec.family].rules(spec, vocab_multiple)
