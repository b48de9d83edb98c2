"""What a checkpoint holds, without loading it.

    python tools/inspect_checkpoint.py CHECKPOINT [--match WORD] [--against OTHER]

CHECKPOINT is a step directory, or a run directory, whose newest valid checkpoint is shown. Everything comes from
manifest.json and file sizes: no tensor is read and nothing is unpickled. Exit code 2 for a checkpoint that is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rlvr.checkpoint.finding import newest_valid
from megatron_rlvr.checkpoint.manifest import Manifest, check_files, read_manifest
from megatron_rlvr.checkpoint.same_run import config_differences
from megatron_rlvr.types import UserError

PARTS = (("optimizer.state.", "optimizer"), ("reference.", "reference"), ("", "weights"))


def resolve(path: Path) -> Path:
    """The checkpoint that `path` means. Raises UserError where there is none."""
    folder = path / "checkpoints"
    if not folder.is_dir():
        return path
    found = newest_valid(folder)
    if found is None:
        raise UserError(f"{folder} holds no valid checkpoint; name a step directory to see what is wrong with it")
    return found


def part_of(name: str) -> str:
    return next(part for prefix, part in PARTS if name.startswith(prefix))


def summary(path: Path, manifest: Manifest) -> Iterator[str]:
    """Lines on the checkpoint as a whole: step, layout, versions, sizes."""
    sizes = ", ".join(f"{name} {value}" for name, value in manifest.layout.items())
    versions = ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
    total = sum(each["bytes"] for each in manifest.files.values())
    yield f"{path}: {manifest.kind} checkpoint after update {manifest.step}"
    yield f"layout    {sizes}"
    yield f"versions  {versions}"
    yield f"on disk   {len(manifest.files)} files, {gigabytes(total)}"
    for part in ("weights", "optimizer", "reference"):
        mine = [tensor for name, tensor in manifest.tensors.items() if part_of(name) == part]
        if mine:
            yield f"{part:9} {len(mine)} tensors, {gigabytes(sum(tensor.bytes for tensor in mine))}"


def tensor_table(manifest: Manifest, word: str) -> Iterator[str]:
    """One line for every tensor whose name contains `word`."""
    chosen = {name: tensor for name, tensor in manifest.tensors.items() if word in name}
    width = max((len(name) for name in chosen), default=0)
    for name, tensor in chosen.items():
        shape = "x".join(map(str, tensor.shape))
        yield f"{name:{width}}  {tensor.dtype:9}  {shape:20}  {tensor.bytes:>14,} bytes in {tensor.pieces} pieces"


def differences(one: Manifest, other: Manifest) -> Iterator[str]:
    """Lines on what two checkpoints do not share: layout, versions, config, tensors."""
    for title, before, now in (
        ("layout", one.layout, other.layout),
        ("versions", one.versions, other.versions),
        ("config", one.details.get("config", {}), other.details.get("config", {})),
    ):
        for key, (old, new) in config_differences(before, now).items():
            yield f"{title} {key}: {old!r} here, {new!r} there"
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        mine, theirs = one.tensors.get(name), other.tensors.get(name)
        if mine is None or theirs is None:
            yield f"tensor {name}: only {'there' if mine is None else 'here'}"
        elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            yield f"tensor {name}: {mine.dtype} {mine.shape} here, {theirs.dtype} {theirs.shape} there"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f} GB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--match", default="", help="list only tensors whose name contains this")
    parser.add_argument("--against", type=Path, help="another checkpoint, to list the differences instead")
    options = parser.parse_args(arguments)
    try:
        path = resolve(options.checkpoint)
        manifest = read_manifest(path)
        lines = [*summary(path, manifest)]
        if options.against is not None:
            lines += differences(manifest, read_manifest(resolve(options.against)))
        else:
            lines += tensor_table(manifest, options.match)
        print("\n".join(lines))
        check_files(path, manifest)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
