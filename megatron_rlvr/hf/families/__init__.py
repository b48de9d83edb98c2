"""One table of name, shape and layout rules per model family."""

from collections.abc import Iterator

from megatron_rlvr.hf.families import qwen3, qwen3_moe
from megatron_rlvr.hf.families.rule import Rule, Source
from megatron_rlvr.types import ModelSpec, UserError

__all__ = ["Rule", "Source", "family_rules"]


def family_rules(spec: ModelSpec, vocab_multiple: int) -> Iterator[Rule]:
    """The rules of spec.family, in model order; UserError when there is no such table."""
    tables = {"qwen3": qwen3.rules, "qwen3_moe": qwen3_moe.rules}
    if spec.family not in tables:
        raise UserError(f"model family {spec.family!r} has no weight table; use one of {', '.join(tables)}.")
    return tables[spec.family](spec, vocab_multiple)
