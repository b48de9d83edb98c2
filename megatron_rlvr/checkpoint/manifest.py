"""What a checkpoint directory says of itself: step, layout, versions, every file's size and every tensor's shape.

The manifest is written last, so a directory without one is unfinished; and small files carry a digest in it, so that
torch's own pickled index is opened only where it is still the one that was written. That guards against damage, not
against a stranger: load checkpoints from places you trust.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

MANIFEST = "manifest.json"
TENSORS = "tensors"
FORMAT = "megatron_rlvr checkpoint 1"
_DIGEST_LIMIT = 1 << 26  # larger files are known by their size alone

Kind = Literal["training", "model"]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor in a checkpoint; `pieces` is how many the writing ranks cut it into."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    kind      training: everything that a run needs to go on; model: weights alone
    step      optimizer updates done
    layout    the parallel sizes that wrote it, by their names in the `actor` section
    versions  of this package, megatron-core, torch and Python
    files     path inside the directory -> bytes, and sha256 of the small ones
    details   what the writer wants to keep beside the tensors, as JSON
    """

    kind: Kind
    step: int
    layout: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, StoredTensor]
    details: dict[str, Any] = field(default_factory=dict)


def package_versions() -> dict[str, str]:
    """Versions of what decides how a checkpoint is written and read."""
    found = {"python": platform.python_version()}
    for name in ("megatron_rlvr", "megatron-core", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size, and for small files the digest, of everything under `directory` but the manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(directory)): _describe(path) for path in files}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT, **asdict(manifest)}
    write_whole(directory / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Raises UserError where there is none, or one of another format."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"{directory} is no finished checkpoint of this package (it has no {MANIFEST}); name a directory such as "
            "RUN_DIR/checkpoints/step_000100"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise UserError(f"{path} is not of the format {FORMAT!r}; read it with the release that wrote it")
    try:
        tensors = {name: StoredTensor(**{**each, "shape": tuple(each["shape"])}) for name, each in
                   content.pop("tensors").items()}  # fmt: skip
        manifest = Manifest(**content, tensors=tensors)
        sound = all(isinstance(each, dict) for each in (manifest.layout, manifest.details, *manifest.files.values()))
        if not sound or not isinstance(manifest.step, int) or not all("bytes" in f for f in manifest.files.values()):
            raise TypeError("an entry is of another form than this package writes")
        return manifest
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint") from None


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise UserError naming the first file that is absent, cut short or changed."""
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the checkpoint; restore it or use another checkpoint")
        found: Mapping[str, Any] = _describe(path) if "sha256" in expected else {"bytes": path.stat().st_size}
        if found != expected:
            raise UserError(
                f"{path} is not what the checkpoint's manifest says ({found['bytes']} bytes found, "
                f"{expected['bytes']} written); restore it or use another checkpoint"
            )


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _DIGEST_LIMIT:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
