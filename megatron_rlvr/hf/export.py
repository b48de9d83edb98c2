"""A Hugging Face directory written by many ranks at once, each its own slices at their places in the final files.

Nothing is gathered: the plan fixes every tensor's file and offset beforehand, so no rank needs memory beyond its shard.
All ranks must see one directory on a POSIX file system (local, Lustre, GPFS), as distributed checkpoints need too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from megatron_rlvr.hf.byte_ranges import Slices, write_slices
from megatron_rlvr.hf.checkpoint import INDEX_FILE, SINGLE_FILE
from megatron_rlvr.hf.experts import FusedPart, fused_parts
from megatron_rlvr.hf.safetensors_file import StoredTensor, build_header, parse_header
from megatron_rlvr.hf.skeleton import Skeleton

MAX_SHARD_BYTES = 5_000_000_000
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class ExportPlan:
    """Where every byte of the new directory goes.

    headers   weight file -> its raw safetensors header
    index     content of the index file; None where there is one weight file
    dtype     what config.json has to be made to name; None: it is left as it is
    """

    skeleton: Skeleton
    headers: Mapping[str, bytes]
    index: bytes | None
    dtype: torch.dtype | None

    @classmethod
    def of(cls, skeleton: Skeleton, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None) -> ExportPlan:
        """Files, order and headers of the source, or new ones cut as transformers' save_pretrained cuts them.

        dtype             dtype on disk; None: the source's
        max_shard_bytes   cut anew into files of this size; None: as the source, and 5 GB where the dtype changes
        """
        stored = skeleton.stored()
        changed = dtype is not None and any(tensor.dtype != dtype for tensor in stored.values())
        if not changed and max_shard_bytes is None:
            return cls(skeleton, skeleton.headers, skeleton.index, dtype)
        entries = {name: (dtype or tensor.dtype, tensor.shape) for name, tensor in stored.items()}
        return cls.of_tensors(skeleton, entries, dtype, max_shard_bytes or MAX_SHARD_BYTES)

    @classmethod
    def of_tensors(
        cls,
        skeleton: Skeleton,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> ExportPlan:
        """Tensors of these dtypes and shapes, cut as transformers' save_pretrained cuts them."""
        ordered = {name: entries[name] for name in sorted(entries, key=_state_order)}
        return cls(skeleton, *_cut(ordered, max_shard_bytes), dtype)

    def stored(self) -> dict[str, StoredTensor]:
        """Every tensor of the new directory; `file` is the name alone."""
        return {
            name: tensor
            for file, header in self.headers.items()
            for name, tensor in parse_header(Path(file), header).items()
        }

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.stored().values())

    def create(self, directory: Path) -> None:
        """Write all that is not weights into the empty `directory`: companions, index, headers; files at full size."""
        self.skeleton.copy_companions(directory, self.dtype)
        if self.index is not None:
            (directory / INDEX_FILE).write_bytes(self.index)
        ends = {file: len(header) for file, header in self.headers.items()}
        for tensor in self.stored().values():
            ends[tensor.file.name] = max(ends[tensor.file.name], tensor.start + tensor.nbytes)
        for file, header in self.headers.items():
            with (directory / file).open("wb") as handle:
                handle.write(header)
                handle.truncate(ends[file])


class PartWriter:
    """Writes slices of tensors into a directory that `ExportPlan.create` prepared. A context: leaving it syncs.

    bytes_written   of tensor data, so far
    """

    def __init__(self, plan: ExportPlan, directory: Path, tied: bool = False) -> None:
        """`tied`: the model ties its head, so a file that holds one gets the embedding there too."""
        self.directory = directory
        self.bytes_written = 0
        self._stored = plan.stored()
        self._repeat_embedding = tied and HEAD in self._stored
        self._fused: dict[str, FusedPart] = {}
        for name, tensor in self._stored.items():
            self._fused.update(fused_parts(name, tensor.shape))
        self._descriptors: dict[Path, int] = {}

    def write(self, name: str, slices: Slices, values: torch.Tensor) -> int:
        """Put `values` at those slices of the Hugging Face tensor `name`, in the plan's dtype; returns the bytes.

        Experts are named one by one, whether the files hold them fused or not; a head that the files hold beside a
        tied embedding is written with the embedding. KeyError for a name that the plan does not have.
        """
        written = self._put(name, slices, values)
        if name == EMBEDDING and self._repeat_embedding:
            written += self._put(HEAD, slices, values)
        return written

    def _put(self, name: str, slices: Slices, values: torch.Tensor) -> int:
        part = self._fused.get(name)
        stored = self._stored[part.fused if part else name]
        if part:
            slices, values = part.slices(slices), values[None]
        values = values.detach().to(device="cpu", dtype=stored.dtype).contiguous()
        if not values.numel():
            return 0
        written = write_slices(self._descriptor(stored.file), stored.start, stored.shape, slices, values)
        self.bytes_written += written
        return written

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.directory / file, os.O_WRONLY)
        return self._descriptors[file]

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            try:
                if kind is None:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._descriptors.clear()


def _cut(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int
) -> tuple[dict[str, bytes], bytes | None]:
    """Headers by file name, and the index, as huggingface_hub splits a state dict."""
    shards = list(_fill(entries, max_bytes))
    if len(shards) == 1:
        return {SINGLE_FILE: build_header({name: entries[name] for name in shards[0]})}, None
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    headers = {
        file: build_header({name: entries[name] for name in shard}) for file, shard in zip(files, shards, strict=True)
    }
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    metadata = {
        "total_parameters": sum(torch.Size(shape).numel() for _, shape in entries.values()),
        "total_size": sum(_nbytes(entry) for entry in entries.values()),
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    return headers, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _fill(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int) -> Iterator[list[str]]:
    """Names of each file: in order, until the next would not fit; a tensor larger than a file gets one of its own."""
    shard: list[str] = []
    filled = 0
    for name, entry in entries.items():
        size = _nbytes(entry)
        if size > max_bytes:
            yield [name]
            continue
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    if shard:
        yield shard


def _nbytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(entry[1]).numel() * entry[0].itemsize


def _state_order(name: str) -> tuple[int | str, ...]:
    """The order of transformers' state dict: embedding, layers by number, final norm, head; experts by number."""
    stage = next((i for i, part in enumerate(("embed_tokens", ".layers.", ".norm", "")) if part in name), 3)
    blocks = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate.", "gate_proj", "up_proj", "down_proj")
    layer, expert = (re.search(rf"{word}\.(\d+)\.", name) for word in ("layers", "experts"))
    return (
        stage,
        int(layer.group(1)) if layer else 0,
        next((i for i, block in enumerate(blocks) if block in name), 0),
        int(expert.group(1)) if expert else -1,
        next((i for i, part in enumerate(parts) if part in name), 0),
        name,
    )
