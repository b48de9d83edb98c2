"""Parameters of a Megatron model against Hugging Face tensors, by a statement of Megatron's layouts of its own.

The package's weight map is not used, so that a mistake in it cannot cancel out on the way back. What megatron-core's
layers expect, of rank r of n:

    linear_qkv   for each of its key-value groups: the group's q heads, then k, then v; rank r has groups r*G/n ...
    linear_fc1   its rows of gate, then its rows of up
    linear_proj, linear_fc2   its columns; a bias whole
    embedding, output_layer   its rows of the vocabulary, zeros behind the last
    norms, router             whole
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rlvr.types import ModelSpec, Place

Read = Callable[[str], torch.Tensor]

_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight)")


@dataclass(frozen=True)
class Part:
    """What a rank holds of the Hugging Face tensor `name`, and what it should hold."""

    name: str
    found: torch.Tensor
    expected: torch.Tensor


def parts(canonical: str, local: torch.Tensor, spec: ModelSpec, place: Place, read: Read) -> Iterator[Part]:
    """The pieces of Hugging Face tensors in this rank's parameter `canonical`.

    Raises ValueError for a parameter that no Hugging Face tensor belongs to.
    """
    if canonical in _OUTSIDE:
        yield from _outside_layers(canonical, local, spec, place, read)
        return
    layer = _LAYER.fullmatch(canonical)
    if layer is None:
        raise ValueError(f"{canonical} belongs to no Hugging Face tensor")
    prefix, inner = f"model.layers.{layer[1]}.", layer[2]
    expert = _EXPERT.fullmatch(inner)
    if inner in _WHOLE:
        name = prefix + _WHOLE[inner]
        yield Part(name, local, read(name))
    elif inner.startswith("self_attention.linear_qkv."):
        yield from _query_key_value(prefix, inner.rsplit(".", 1)[1], local, spec, place, read)
    elif inner == "self_attention.linear_proj.weight":
        yield _columns(f"{prefix}self_attn.o_proj.weight", local, place.tensor_rank, read)
    elif expert:
        block, rank = f"{prefix}mlp.experts.{expert[1]}.", place.expert_tensor_rank
        yield from _mlp(block, expert[2], expert[3], local, rank, read)
    else:
        linear, kind = inner.removeprefix("mlp.").split(".")
        yield from _mlp(f"{prefix}mlp.", linear, kind, local, place.tensor_rank, read)


def _outside_layers(canonical: str, local: torch.Tensor, spec: ModelSpec, place: Place, read: Read) -> Iterator[Part]:
    name = _OUTSIDE[canonical]
    if name == "model.norm.weight":
        yield Part(name, local, read(name))
        return
    if name == "lm_head.weight" and spec.tie_word_embeddings:  # the last pipeline stage's copy
        name = "model.embed_tokens.weight"
    first, rows = place.tensor_rank * len(local), len(local)
    expected = read(name)[first : first + rows]
    yield Part(name, local[: len(expected)], expected)
    padding = local[len(expected) :]
    yield Part(name, padding, torch.zeros_like(padding))


def _query_key_value(
    prefix: str, kind: str, local: torch.Tensor, spec: ModelSpec, place: Place, read: Read
) -> Iterator[Part]:
    head, per_group = spec.head_dim, spec.num_attention_heads // spec.num_key_value_heads
    groups = spec.num_key_value_heads // place.tensor_size
    found: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(groups):
        for projection, heads in (("q", per_group), ("k", 1), ("v", 1)):
            found[projection].append(local[row : row + heads * head])
            row += heads * head
    for projection, pieces in found.items():
        name = f"{prefix}self_attn.{projection}_proj.{kind}"
        yield _rows(name, torch.cat(pieces), place.tensor_rank, read)


def _mlp(block: str, linear: str, kind: str, local: torch.Tensor, rank: int, read: Read) -> Iterator[Part]:
    if linear == "linear_fc2":
        yield _columns(f"{block}down_proj.{kind}", local, rank, read)
        return
    half = len(local) // 2
    yield _rows(f"{block}gate_proj.{kind}", local[:half], rank, read)
    yield _rows(f"{block}up_proj.{kind}", local[half:], rank, read)


def _rows(name: str, found: torch.Tensor, rank: int, read: Read) -> Part:
    return Part(name, found, read(name)[rank * len(found) : (rank + 1) * len(found)])


def _columns(name: str, found: torch.Tensor, rank: int, read: Read) -> Part:
    width = found.shape[1]
    return Part(name, found, read(name)[:, rank * width : (rank + 1) * width])


def compare_parameters(
    parameters: Mapping[str, torch.Tensor], spec: ModelSpec, place: Place, read: Read
) -> dict[str, str]:
    """Hugging Face name -> "" where this rank's part is bit for bit that of `read`, else what is wrong with it.

    The reference is rounded to the parameter's dtype first. Tensors of which this rank holds nothing are left out.
    """
    found: dict[str, str] = {}
    for canonical, parameter in parameters.items():
        for part in parts(canonical, parameter.detach().cpu(), spec, place, read):
            found[part.name] = found.get(part.name, "") or difference(part, read)
    return found


def merge_findings(findings: Sequence[Mapping[str, str]], names: Iterable[str]) -> dict[str, str]:
    """What `compare_parameters` found on all ranks, for every tensor in `names`; one that no rank holds is wrong."""
    merged = {name: f"{name}: no rank holds any of it" for name in names}
    for name in (name for found in findings for name in found):
        merged[name] = next((found[name] for found in findings if found.get(name)), "")
    return merged


def difference(part: Part, read: Read) -> str:
    """One sentence on what `part` holds instead of what it should; empty where it is right."""
    found, expected = part.found, part.expected.to(part.found.dtype)
    if found.shape != expected.shape:
        return f"{part.name}: shape {list(found.shape)} instead of {list(expected.shape)}"
    rows = (found != expected).flatten(1).any(1) if found.dim() > 1 else found != expected
    if not rows.any():
        return ""
    reason = _other_tensor(part, read) or _other_order(found, expected)
    return (
        f"{part.name}: {int(rows.sum())} of {len(rows)} rows differ, from row {int(rows.nonzero()[0])} on, by up to "
        f"{(found.double() - expected.double()).abs().max():.3g}{reason}"
    )


def _other_tensor(part: Part, read: Read) -> str:
    """The sibling that the part really is: gate and up, q, k and v, or the experts of the layer taken for another."""
    for name in _siblings(part.name):
        try:
            other = read(name)
        except KeyError:
            continue
        if any(torch.equal(piece.to(part.found.dtype), part.found) for piece in _pieces(other, part.found)):
            return f": it holds {name}"
    return ""


def _siblings(name: str) -> Iterator[str]:
    for one, other in (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_norm", "k_norm")):
        if one in name:
            yield name.replace(one, other)
        elif other in name:
            yield name.replace(other, one)
    if expert := re.match(r"(.+\.experts\.)(\d+)(\..+)", name):
        yield from (f"{expert[1]}{e}{expert[3]}" for e in range(1024) if e != int(expert[2]))


def _pieces(tensor: torch.Tensor, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The consecutive parts of `tensor` along one dimension that have the shape of `like`."""
    for dim in range(tensor.dim()):
        if like.shape[dim] and tensor.shape[dim] % like.shape[dim] == 0:
            yield from (piece for piece in tensor.split(like.shape[dim], dim) if piece.shape == like.shape)


def _other_order(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.dim() == 2 and _sorted(found) == _sorted(expected):
        return ": the same rows in another order"
    return ""


def _sorted(tensor: torch.Tensor) -> list[bytes]:
    return sorted(row.contiguous().view(torch.uint8).numpy().tobytes() for row in tensor)


def compare_rotary(found: torch.Tensor, expected: torch.Tensor) -> str:
    """One sentence where rotary frequencies [head_dim/2] are not transformers' to two units in the last place."""
    if found.shape != expected.shape:
        return f"rope: {len(found)} rotary frequencies instead of {len(expected)}: check head_dim"
    apart = (found - expected).abs() / expected
    if apart.max() <= 2.5e-7:
        return ""
    pair = int((apart > 2.5e-7).nonzero()[0])
    mine, theirs = (_theta(frequencies) for frequencies in (found, expected))
    return (
        f"rope_theta: rotary frequencies differ from pair {pair} on, by a factor of up to {(1 + apart.max()):.4g}; the "
        f"second pair turns as with rope_theta {mine:.6g} in Megatron and {theirs:.6g} in transformers"
    )


def _theta(frequencies: torch.Tensor) -> float:
    """The base that default RoPE's second frequency belongs to: theta^(-2/head_dim)."""
    return float(frequencies[min(1, len(frequencies) - 1)].double() ** -len(frequencies))
