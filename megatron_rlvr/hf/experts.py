"""Experts on disk: one tensor per expert, or fused over the experts of a layer as newer transformers may write them.

Fused: `mlp.experts.gate_up_proj` [experts, 2*ffn, hidden] (gate rows first) and
`mlp.experts.down_proj` [experts, hidden, ffn].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_rlvr.hf.layouts import Shape, Slices

_PER_EXPERT = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = re.compile(r"^(.+\.mlp\.experts)\.(gate_up|down)_proj$")


@dataclass(frozen=True)
class FusedPart:
    """Where one expert's tensor lies in a fused one: `tensor[expert, rows]`."""

    fused: str
    expert: int
    rows: slice

    def slices(self, inner: Slices) -> Slices:
        """Slices into the fused tensor for `inner` slices of the expert's own tensor."""
        start = self.rows.start + (inner[0].start or 0)
        stop = self.rows.stop if inner[0].stop is None else self.rows.start + inner[0].stop
        return (slice(self.expert, self.expert + 1), slice(start, min(stop, self.rows.stop)), *inner[1:])


def fused_parts(name: str, shape: Shape) -> dict[str, FusedPart]:
    """Per-expert names that a stored tensor holds, with their place in it; empty unless it is fused experts."""
    found = _FUSED.match(name)
    if found is None or len(shape) != 3:
        return {}
    prefix, kind = found.groups()
    projections = ("gate", "up") if kind == "gate_up" else ("down",)
    return {
        f"{prefix}.{expert}.{projection}_proj.weight": _place(name, shape, expert, projection)
        for expert in range(shape[0])
        for projection in projections
    }


def fuse_experts(
    tensors: Iterable[tuple[str, torch.Tensor]], stored: Mapping[str, Shape]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather per-expert tensors into the fused ones that `stored` (name -> shape) holds; all others pass through.

    Raises ValueError when the stream ends before a fused tensor is complete.
    """
    unfinished: dict[str, tuple[torch.Tensor, set[str]]] = {}
    for name, tensor in tensors:
        part = _part_of(name, stored)
        if part is None:
            yield name, tensor
            continue
        if part.fused not in unfinished:
            whole = torch.empty(stored[part.fused], dtype=tensor.dtype)
            unfinished[part.fused] = whole, set(fused_parts(part.fused, stored[part.fused]))
        whole, missing = unfinished[part.fused]
        whole[part.expert, part.rows].copy_(tensor)
        missing.discard(name)
        if not missing:
            yield part.fused, unfinished.pop(part.fused)[0]
    for fused, (_, missing) in unfinished.items():
        raise ValueError(f"{fused} is incomplete: {min(missing)} was never written")


def _part_of(name: str, stored: Mapping[str, Shape]) -> FusedPart | None:
    found = _PER_EXPERT.match(name)
    if found is None or name in stored:
        return None
    prefix, expert, projection = found.groups()
    fused = f"{prefix}.{'down' if projection == 'down' else 'gate_up'}_proj"
    return _place(fused, stored[fused], int(expert), projection) if fused in stored else None


def _place(fused: str, shape: Shape, expert: int, projection: str) -> FusedPart:
    rows = shape[1] if projection == "down" else shape[1] // 2
    first = rows if projection == "up" else 0
    return FusedPart(fused, expert, slice(first, first + rows))
