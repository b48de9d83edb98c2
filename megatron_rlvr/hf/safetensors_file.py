"""The header of a safetensors file, read and checked without touching its data."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_rlvr.types import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# The format's own bound; a larger value means that the first 8 bytes are no header length.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file, by name.

    Raises UserError when the file is missing, its header is broken, or it is shorter or longer than the header says.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; download that file again.")
    size = path.stat().st_size
    header, data_start = _raw_header(path, size)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    stored = {name: _stored(path, name, entry) for name, entry in tensors.items()}
    end = data_start + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if end != size:
        last = max(tensors, key=lambda name: tensors[name]["data_offsets"][1], default="its header")
        raise UserError(f"{path} has {size} bytes but {last} ends at {end}: it is damaged; download that file again.")
    return stored


def _raw_header(path: Path, size: int) -> tuple[dict, int]:
    broken = UserError(f"{path} has no complete safetensors header ({size} bytes): it is damaged; download it again.")
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise broken
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise broken
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise broken from None
    if not isinstance(header, dict):
        raise broken
    return header, 8 + length


def _stored(path: Path, name: str, entry: dict) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        consistent = stop - start == prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        consistent = False
    if not consistent:
        raise UserError(f"{path}: the header entry of {name} is inconsistent ({entry}); download that file again.")
    return StoredTensor(path, dtype, shape)
