"""Write a trained model back as a Hugging Face directory: the source's names, shapes, files; whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rlvr.hf.checkpoint import INDEX_FILE, SINGLE_FILE, HFCheckpoint
from megatron_rlvr.hf.experts import fuse_experts
from megatron_rlvr.hf.layouts import Shape
from megatron_rlvr.hf.skeleton import copy_companions
from megatron_rlvr.hf.staging import check_target, staged_directory

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def write_checkpoint(
    target: str | Path,
    source_dir: str | Path,
    tensors: NamedTensors,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write `tensors` (Hugging Face name, whole tensor) as the directory `target`, with companions from `source_dir`.

    The stream may come in any order, experts one by one; on disk, experts and a tied head stored twice look as they do
    in the source. Memory: one shard. Written beside the target, synced and renamed, so that killed at any time the
    target is absent or whole.

    dtype      dtype on disk (config.json then names it); None: as the tensors come
    overwrite  replace an existing target; otherwise it is refused

    Raises UserError for a bad source and for a target that exists, lies in the source or has no room; ValueError
    when the stream is not the source's tensors.
    """
    target, source_dir = Path(target).absolute(), Path(source_dir)
    source = HFCheckpoint(source_dir)
    check_target(target, source_dir, source.tensor_bytes(dtype), overwrite)
    with staged_directory(target) as partial:
        _write_shards(partial, _as_stored(tensors, source), source.stored_shapes(), dtype, max_shard_bytes)
        copy_companions(source_dir, partial, dtype)


def _as_stored(tensors: NamedTensors, source: HFCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream as the source stores it: experts fused, a tied head repeated, every tensor once, with its shape."""
    shapes = source.stored_shapes()
    missing = dict(shapes)
    for name, tensor in fuse_experts(_with_tied_head(tensors, shapes), shapes):
        if name not in shapes or tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} {list(tensor.shape)} is not in {source.path}: {shapes.get(name, 'no such name')}")
        if missing.pop(name, None) is None:
            raise ValueError(f"{name} was written twice")
        yield name, tensor
    if missing:
        raise ValueError(f"{min(missing)} of {source.path} was never written")


def _with_tied_head(tensors: NamedTensors, shapes: dict[str, Shape]) -> Iterator[tuple[str, torch.Tensor]]:
    """Repeat the embedding as lm_head.weight at the end where the source stores one and the stream has none."""
    embedding, has_head = None, False
    for name, tensor in tensors:
        has_head |= name == "lm_head.weight"
        embedding = tensor if name == "model.embed_tokens.weight" else embedding
        yield name, tensor
    if "lm_head.weight" in shapes and not has_head and embedding is not None:
        yield "lm_head.weight", embedding


def _write_shards(
    directory: Path, tensors: NamedTensors, shapes: dict[str, Shape], dtype: torch.dtype | None, max_bytes: int
) -> None:
    shards: list[list[str]] = []
    total = 0
    for shard in _fill_shards(tensors, dtype, max_bytes):
        total += sum(tensor.nbytes for tensor in shard.values())
        shards.append(list(shard))
        _save(shard, directory / f"{len(shards)}.safetensors")
    if len(shards) == 1:
        (directory / "1.safetensors").rename(directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": {name: weight_map[name] for name in sorted(shapes)}}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _fill_shards(tensors: NamedTensors, dtype: torch.dtype | None, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        # A copy: slices of one merged tensor share memory, which safetensors refuses.
        owned = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype, copy=True).contiguous()
        if shard and filled + owned.nbytes > max_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = owned
        filled += owned.nbytes
    if shard:
        yield shard


def _save(shard: dict[str, torch.Tensor], path: Path) -> None:
    save_file(shard, path, metadata={"format": "pt"})
    # safetensors makes its files private to the owner; others must be able to read them like the rest.
    path.chmod(path.parent.stat().st_mode & 0o666)
