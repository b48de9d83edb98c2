"""Which checkpoint a run goes on from; reads manifests and sizes, loads nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron_rlvr.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from megatron_rlvr.checkpoint.same_run import check_same_run
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

LATEST = "latest"  # a file that names the newest checkpoint beside it, for people and scripts
_STEP = re.compile(r"step_(\d+)")


def step_directory(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def finished_checkpoints(folder: Path) -> list[Path]:
    """The directories in `folder` that were written to the end, newest first."""
    found = {}
    for path in folder.glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match.group(1))] = path
    return [found[step] for step in sorted(found, reverse=True)]


def newest_valid(folder: Path, tell: Callable[[str], object] = lambda _: None) -> Path | None:
    """The newest checkpoint whose files are all as they were written; `tell` hears why newer ones are passed over."""
    for path in finished_checkpoints(folder):
        try:
            check_files(path, read_manifest(path))
        except UserError as error:
            tell(f"passing over {path.name}: {error}")
            continue
        return path
    return None


def find_checkpoint(config: RunConfig, tell: Callable[[str], object] = lambda _: None) -> Path | None:
    """What `checkpoint.resume` means now: a checkpoint of the same run, or None to start from the beginning.

    Raises UserError where the named one is no valid training checkpoint, or belongs to a run with other settings.
    """
    wanted = config.checkpoint.resume
    if wanted == "never":
        return None
    path = (
        newest_valid(RunFiles(config.run_dir).checkpoints, tell) if wanted == "auto" else _named(config, Path(wanted))
    )
    if path is not None:
        manifest = read_manifest(path)
        check_same_run(manifest.details["config"], config, manifest.step)
    return path


def continues_in_place(config: RunConfig, checkpoint: Path | None) -> bool:
    """True where the checkpoint is run_dir's own, so that its metrics and files are continued."""
    return checkpoint is not None and checkpoint.parent.resolve() == RunFiles(config.run_dir).checkpoints.resolve()


def _named(config: RunConfig, path: Path) -> Path:
    own = RunFiles(config.run_dir).checkpoints
    manifest = _training_manifest(path)
    check_files(path, manifest)
    if continues_in_place(config, path) and path.resolve() != (newest_valid(own) or path).resolve():
        raise UserError(
            f"checkpoint.resume names {path}, but run_dir holds newer ones that going on from it would overwrite; name "
            "another run_dir"
        )
    return path


def _training_manifest(path: Path) -> Manifest:
    manifest = read_manifest(path)
    if manifest.kind != "training":
        raise UserError(
            f"checkpoint.resume names {path}, which holds weights alone; convert it to a Hugging Face directory and "
            "start a new run with model.path naming that"
        )
    return manifest
