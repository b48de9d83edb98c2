"""Which code a run was started with."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GitState:
    """commit is None outside a repository; diff_sha256 covers changes to tracked files and the untracked ones."""

    commit: str | None
    branch: str | None = None
    dirty: bool = False
    diff_sha256: str | None = None


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def git_state(root: Path) -> GitState:
    """The commit that `root` stands at, and a digest of everything that differs from it."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return GitState(None)
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD") or b""
    changes = _git(root, "diff", "--binary", "HEAD") or b""
    untracked = sorted((_git(root, "ls-files", "-z", "--others", "--exclude-standard") or b"").split(b"\0"))
    digest = hashlib.sha256(changes)
    for name in filter(None, untracked):
        path = root / name.decode(errors="surrogateescape")
        digest.update(name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    dirty = bool(changes or any(untracked))
    return GitState(commit.decode().strip(), branch.decode().strip(), dirty, digest.hexdigest() if dirty else None)
