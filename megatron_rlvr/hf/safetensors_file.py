"""Safetensors files by byte range: the header read and checked without its data, and a header for given tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The format's own bound; a larger value means that the first 8 bytes are no header length.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk; its bytes begin at `start` of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file, by name.

    Raises UserError when the file is missing, its header is broken, or it is shorter or longer than the header says.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; download that file again.")
    size = path.stat().st_size
    raw = raw_header(path)
    stored = parse_header(path, raw)
    end = max((tensor.start + tensor.nbytes for tensor in stored.values()), default=len(raw))
    if end != size:
        last = max(stored, key=lambda name: stored[name].start, default="its header")
        raise UserError(f"{path} has {size} bytes but {last} ends at {end}: it is damaged; download that file again.")
    return stored


def raw_header(path: Path) -> bytes:
    """The file up to its first tensor: 8 bytes of length and the JSON text; UserError where it is cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise _broken(path, size)
        return prefix + file.read(length)


def parse_header(path: Path, raw: bytes) -> dict[str, StoredTensor]:
    """The tensors that a raw header describes, by name; `path` is the file that they belong to."""
    try:
        header = json.loads(raw[8:])
    except ValueError:
        raise _broken(path, len(raw)) from None
    if not isinstance(header, dict):
        raise _broken(path, len(raw))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    stored = {name: _stored(path, name, entry, len(raw)) for name, entry in tensors.items()}
    _refuse_overlap(path, stored, len(raw))
    return stored


def build_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The raw header that safetensors itself writes for tensors of these (dtype, shape), with transformers' metadata.

    The file holds wide dtypes first and names in order within a dtype; the text is padded to 8 bytes.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n][0].itemsize, n)):
        dtype, shape = tensors[name]
        end = position + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _broken(path: Path, size: int) -> UserError:
    return UserError(
        f"{path} has no complete safetensors header ({size} bytes): it is damaged; download that file again."
    )


def _refuse_overlap(path: Path, stored: dict[str, StoredTensor], start: int) -> None:
    """The format wants the tensors to lie one after the other, without gap or overlap."""
    for name in sorted(stored, key=lambda n: (stored[n].start, stored[n].nbytes)):
        if stored[name].start != start:
            raise UserError(
                f"{path}: {name} starts at byte {stored[name].start}, not {start}; download that file again."
            )
        start += stored[name].nbytes


def _stored(path: Path, name: str, entry: dict, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        consistent = stop - start == prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        consistent = False
    if not consistent:
        raise UserError(f"{path}: the header entry of {name} is inconsistent ({entry}); download that file again.")
    return StoredTensor(path, dtype, shape, data_start + start)
