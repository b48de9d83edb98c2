"""`convert quantise`: a Hugging Face directory in FP8 from one in BF16 or float32, whole or not at all.

Quantised are the matrices of attention and MLP, experts among them; router, embeddings, norms, biases and the head stay
BF16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rlvr.hf.byte_ranges import whole
from megatron_rlvr.hf.checkpoint import HFCheckpoint
from megatron_rlvr.hf.export import MAX_SHARD_BYTES, ExportPlan, PartWriter
from megatron_rlvr.hf.fp8 import BLOCK, quantise_block, scale_shape
from megatron_rlvr.hf.skeleton import Skeleton
from megatron_rlvr.hf.spec import read_model_spec
from megatron_rlvr.hf.staging import check_target, staged_directory
from megatron_rlvr.types import ModelSpec, UserError

_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"


def is_quantised(name: str) -> bool:
    """True for the weights that FP8 checkpoints store in FP8: the projections of attention, MLP and experts."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def scale_name(name: str) -> str:
    """The tensor that holds the block scales of the weight `name`."""
    return name.removesuffix(_WEIGHT) + _SCALE


def kept_modules(spec: ModelSpec) -> list[str]:
    """The linear layers that stay BF16, as `modules_to_not_convert` lists them: the head and every router."""
    return ["lm_head", *(f"model.layers.{i}.mlp.gate" for i, routed in enumerate(spec.moe_layers) if routed)]


def quantise_fp8_block(
    source: Path,
    target: Path,
    *,
    pow2: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Write `source` as `target` with 128 x 128 block scales (`weight_scale_inv`), one tensor in memory at a time.

    Experts come out one by one, fused or not in the source, as published FP8 checkpoints have them. `pow2` rounds the
    scales up to powers of two; `progress` is told the bytes of every tensor read.

    Raises UserError naming the tensor for a source that is not a complete unquantised model or not finite, and for a
    target that exists or has no room; nothing is left behind then.
    """
    checkpoint, spec = HFCheckpoint(source), read_model_spec(source)
    checkpoint.check_complete(spec)
    plan = ExportPlan.of_tensors(Skeleton.of(checkpoint), _entries(checkpoint), torch.bfloat16, max_shard_bytes)
    check_target(target, source, plan.tensor_bytes, overwrite)
    with staged_directory(target) as partial:
        plan.create(partial)
        with PartWriter(plan, partial) as writer:
            for name in checkpoint.names():
                tensor = checkpoint.read(name)
                for part, values in _stored_form(name, tensor, source, pow2):
                    writer.write(part, whole(values.shape), values)
                if progress is not None:
                    progress(tensor.nbytes)
        describe_quantisation(partial / "config.json", block_config(spec))


def block_config(spec: ModelSpec) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with block scales, as transformers and vLLM read it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": kept_modules(spec),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def describe_quantisation(config_file: Path, quantisation: Mapping[str, Any]) -> None:
    """Add `quantization_config` to a config.json, whose other keys stay as they are."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["quantization_config"] = dict(quantisation)
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _entries(checkpoint: HFCheckpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        entries[name] = (torch.float8_e4m3fn if is_quantised(name) else torch.bfloat16, shape)
        if is_quantised(name):
            entries[scale_name(name)] = (torch.float32, scale_shape(shape))
    return entries


def _stored_form(name: str, tensor: torch.Tensor, source: Path, pow2: bool) -> list[tuple[str, torch.Tensor]]:
    if not is_quantised(name):
        return [(name, tensor)]
    try:
        weight, scales = quantise_block(tensor, pow2)
    except ValueError as error:
        raise UserError(f"{source}: {name} cannot be quantised ({error}); check the run that wrote it.") from error
    return [(name, weight), (scale_name(name), scales)]
