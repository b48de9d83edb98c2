"""A Hugging Face directory without its weights: what an export needs to know of the model that it began with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rlvr.hf.checkpoint import INDEX_FILE, SINGLE_FILE, HFCheckpoint
from megatron_rlvr.hf.safetensors_file import StoredTensor, parse_header, raw_header
from megatron_rlvr.types import UserError

# Everything of a model directory that is not weights: config, generation defaults, tokenizer, chat template, licence.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "LICENSE*",
)
_HEADER = ".header"


@dataclass(frozen=True)
class Skeleton:
    """Companion files, and the header of every weight file.

    path      directory with the companions
    headers   weight file -> its raw safetensors header
    """

    path: Path
    headers: Mapping[str, bytes]

    @classmethod
    def of(cls, checkpoint: HFCheckpoint) -> Skeleton:
        """That of an opened checkpoint, which is therefore known to be sound."""
        return cls(checkpoint.path, {file.name: raw_header(file) for file in checkpoint.files()})

    @classmethod
    def read(cls, directory: Path) -> Skeleton:
        """What `save` wrote; UserError where it is not there."""
        files = sorted(directory.glob(f"*{_HEADER}"))
        if not files or not (directory / "config.json").is_file():
            raise UserError(f"{directory} does not hold a model's config.json and weight headers; convert it again.")
        return cls(directory, {file.name.removesuffix(_HEADER): file.read_bytes() for file in files})

    def save(self, directory: Path) -> None:
        """Write companions, index and headers to `directory`, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        self.copy_companions(directory)
        if self.index is not None:
            (directory / INDEX_FILE).write_bytes(self.index)
        for file, header in self.headers.items():
            (directory / f"{file}{_HEADER}").write_bytes(header)

    @property
    def index(self) -> bytes | None:
        """The index file's bytes; None where there is one weight file without an index."""
        file = self.path / INDEX_FILE
        return file.read_bytes() if file.is_file() and set(self.headers) != {SINGLE_FILE} else None

    def stored(self) -> dict[str, StoredTensor]:
        """Every tensor as it lies on disk; `file` is the name alone."""
        return {
            name: tensor
            for file, header in self.headers.items()
            for name, tensor in parse_header(Path(file), header).items()
        }

    def copy_companions(self, target: Path, dtype: torch.dtype | None = None) -> None:
        """Copy config, tokenizer and generation files byte for byte; with `dtype`, config.json is made to name it."""
        copy_companions(self.path, target, dtype)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy all files of a model but its weights; with `dtype`, config.json is made to name that one."""
    for file in {file for pattern in _COMPANIONS for file in source.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, target / file.name)
    if dtype is not None:
        _name_dtype(target / "config.json", str(dtype).removeprefix("torch."))


def _name_dtype(config_file: Path, dtype: str) -> None:
    """Keep config.json's statement of the dtype true; the file stays byte-identical when it already is."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
