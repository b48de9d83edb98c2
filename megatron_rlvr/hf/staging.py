"""A directory that appears under its name whole or not at all, whenever its writer is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_rlvr.files import locked
from megatron_rlvr.types import UserError


def check_target(target: Path, source: Path, needed_bytes: int, overwrite: bool = False) -> None:
    """Refuse, before anything is written, a target that would touch the source, exists, or does not fit on its disk.

    Raises UserError.
    """
    here, there = _resolved(target), source.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UserError(
            f"{target} lies in or around the source {source}, which stays as it is; choose another directory."
        )
    _restore(target)
    if os.path.lexists(target) and not target.is_dir():  # a symbolic link to nothing exists too
        raise UserError(f"{target} already exists and is no directory; choose another name.")
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise UserError(f"{target} already exists and is not empty; choose another directory or ask to overwrite it.")
    parent = next(p for p in here.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{target} cannot be made, for {parent} is not a writable directory; choose another.")
    leftover = sum(file.stat().st_size for file in partial_path(target).rglob("*") if file.is_file())
    free = shutil.disk_usage(parent).free + leftover
    if needed_bytes > free:
        raise UserError(
            f"{target} needs {needed_bytes / 1e9:.2f} GB but {parent} has {free / 1e9:.2f} GB free; make room or "
            "choose another directory."
        )


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """An empty directory beside `target`; leaving the context syncs it and renames it to `target`, replacing that.

    An exception removes it. What a killed writer left is recognised by its name and removed by the next one.
    Raises UserError where another process is writing the same target.
    """
    target, partial = target.absolute(), partial_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if partial.exists():
            stack.enter_context(locked(partial, target))
            remove(partial)
        partial.mkdir()
        stack.enter_context(locked(partial, target))
        try:
            yield partial
            sync_directory(partial)
            _put_in_place(partial, target)
        except BaseException:
            remove(partial)
            raise


def partial_path(target: Path) -> Path:
    """Where `target` is written until it is whole."""
    target = target.absolute()
    return target.parent / f".{target.name}.partial"


def remove_partial(target: Path) -> None:
    """Remove what a failed writer left of `target`; what another process is writing now stays."""
    partial = partial_path(target)
    with contextlib.suppress(FileNotFoundError, UserError), locked(partial, target):
        remove(partial)


def sync_directory(directory: Path) -> None:
    """Make all files of a directory, and their names, durable."""
    for path in (*(file for file in directory.rglob("*")), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove whatever `path` is; nothing is fine too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _resolved(target: Path) -> Path:
    """Where `target` is or would be, links followed. Raises UserError for a name that the file system cannot hold."""
    try:
        _aside(target).exists()
        return target.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{target} cannot be made ({reason}); choose another directory.") from None


def _aside(target: Path) -> Path:
    target = target.absolute()
    return target.parent / f".{target.name}.replaced"


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename into place; an old target is moved aside first, because a full directory cannot be renamed over."""
    aside = _aside(target)
    remove(aside)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    remove(aside)


def _restore(target: Path) -> None:
    """Give a directory its name back that was moved aside by a writer killed before it put the new one there."""
    if _aside(target).exists() and not target.exists():
        _aside(target).rename(target)
