"""A Hugging Face checkpoint directory, opened lazily and checked before anything is read from it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import torch

from megatron_rlvr.hf.byte_ranges import read_slices, whole
from megatron_rlvr.hf.experts import FusedPart, fused_parts
from megatron_rlvr.hf.layouts import Shape, Slices
from megatron_rlvr.hf.mapping import WeightMap
from megatron_rlvr.hf.safetensors_file import StoredTensor, read_header
from megatron_rlvr.types import ModelSpec, UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING = (torch.bfloat16, torch.float16, torch.float32)


class HFCheckpoint:
    """Tensors of a directory with model.safetensors or an index and shards; experts always appear one by one.

    Opening reads every file's header and no data. Raises UserError naming file and tensor when a file is missing,
    truncated or damaged, or when index and shards disagree.

    bytes_read   of tensor data, so far, through this object
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stored = _open_directory(self.path)
        self._fused: dict[str, FusedPart] = {}
        for name, tensor in self._stored.items():
            self._fused.update(fused_parts(name, tensor.shape))
        self._files: dict[Path, BinaryIO] = {}
        self.bytes_read = 0

    def names(self) -> list[str]:
        """Every tensor, with fused experts taken apart into one name per expert."""
        fused = {part.fused for part in self._fused.values()}
        return [name for name in self._stored if name not in fused] + list(self._fused)

    def files(self) -> list[Path]:
        """The weight files, by name."""
        return sorted({tensor.file for tensor in self._stored.values()})

    def stored_shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor as it lies on disk (fused experts whole)."""
        return {name: tensor.shape for name, tensor in self._stored.items()}

    def tensor_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of all tensors, as they are stored or as they would be in `dtype`."""
        return sum(t.nbytes // t.dtype.itemsize * (dtype or t.dtype).itemsize for t in self._stored.values())

    def shape(self, name: str) -> Shape:
        """Shape of `name`; KeyError when there is none."""
        if name in self._fused:
            part = self._fused[name]
            return (part.rows.stop - part.rows.start, *self._stored[part.fused].shape[2:])
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype on disk of `name`; KeyError when there is none."""
        return self._stored[self._stored_name(name)].dtype

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """The tensor, or the part of it that `slices` (one per dimension) names; only that part is read.

        Raises UserError when the checkpoint has no such tensor.
        """
        if name not in self._stored and name not in self._fused:
            raise UserError(
                f"{self.path} has no tensor {name}; download the checkpoint again or check its config.json."
            )
        slices = slices or whole(self.shape(name))
        if name in self._fused:
            return self._slice(self._fused[name].fused, self._fused[name].slices(slices))[0]
        return self._slice(name, slices)

    def check_complete(self, spec: ModelSpec) -> None:
        """Refuse, naming the tensor, unless exactly the model's tensors are there, in the right shapes and one dtype.

        A tied model may store its head a second time, as several published checkpoints do.
        """
        expected = WeightMap(spec).hf_shapes()
        present = set(self.names())
        tied_head = {"lm_head.weight": expected["model.embed_tokens.weight"]} if spec.tie_word_embeddings else {}
        for name in expected:
            if name not in present:
                raise UserError(
                    f"{self.path} lacks the tensor {name}; download the checkpoint again or check config.json."
                )
        allowed = expected | tied_head
        for name in sorted(present):
            if name not in allowed:
                raise UserError(
                    f"{self.path} holds {name}, which a {spec.family} model does not have; check config.json."
                )
            if self.shape(name) != allowed[name]:
                raise UserError(
                    f"{self.path}: {name} has shape {list(self.shape(name))} but config.json asks for "
                    f"{list(allowed[name])}; use the config.json that belongs to these weights."
                )

        self.uniform_dtype()

    def uniform_dtype(self) -> torch.dtype:
        """The floating dtype that all tensors have; UserError naming the first tensor of another one."""
        count = Counter(tensor.dtype for tensor in self._stored.values())
        usual = count.most_common(1)[0][0]
        for name, tensor in self._stored.items():
            if tensor.dtype not in FLOATING:
                raise UserError(
                    f"{tensor.file}: {name} is {_name(tensor.dtype)}; training needs the unquantised checkpoint in one "
                    "of bfloat16, float16 and float32."
                )
            if tensor.dtype != usual:
                raise UserError(
                    f"{tensor.file}: {name} is {_name(tensor.dtype)} but {count[usual]} other tensors are "
                    f"{_name(usual)}; download that file again or save the model in one dtype."
                )
        return usual

    def _stored_name(self, name: str) -> str:
        return self._fused[name].fused if name in self._fused else name

    def _slice(self, name: str, slices: Slices) -> torch.Tensor:
        stored = self._stored[name]
        if stored.file not in self._files:
            self._files[stored.file] = stored.file.open("rb", buffering=0)
        descriptor = self._files[stored.file].fileno()
        try:
            values, count = read_slices(descriptor, stored.start, stored.shape, stored.dtype, slices)
        except (EOFError, OSError) as error:
            raise UserError(f"{stored.file}: {name} cannot be read ({error}); download that file again.") from error
        self.bytes_read += count
        return values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_directory(path: Path) -> dict[str, StoredTensor]:
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a Hugging Face directory with config.json and *.safetensors.")
    if (path / INDEX_FILE).is_file():
        return _open_index(path)
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    raise UserError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors.")


def _open_index(path: Path) -> dict[str, StoredTensor]:
    weight_map = _read_weight_map(path / INDEX_FILE)
    shards = {}
    for file in sorted(set(weight_map.values())):
        if not (path / file).is_file():
            tensor = next(name for name, shard in weight_map.items() if shard == file)
            raise UserError(
                f"{path / file} does not exist but the index puts {tensor} there; download that file again."
            )
        shards[file] = read_header(path / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise UserError(f"{path / file} lacks {name}, which the index puts there; download that file again.")
    for file, tensors in shards.items():
        for name in tensors:
            if weight_map.get(name) != file:
                raise UserError(
                    f"{path / file} holds {name}, which the index does not put there; download the index again."
                )
    return {name: shards[file][name] for name, file in weight_map.items()}


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{index} is not a valid index (JSON with weight_map); download that file again.") from None
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{index}: {name} points to {file!r}, which is not a file of the directory; download it again."
            )
    return weight_map
