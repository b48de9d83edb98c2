"""Where a run's files lie, and the start of a run: an earlier run is refused or set aside, never half overwritten."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError


@dataclass(frozen=True)
class RunFiles:
    """The names inside a run directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.root / "wandb"

    @property
    def wandb_id(self) -> Path:
        return self.root / "wandb_id.txt"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.root / "model"

    @property
    def best(self) -> Path:
        """The best model so far by the validation set that the config names, with trainer.save_best."""
        return self.root / "best"

    @property
    def evaluations(self) -> Path:
        """Best and last evaluation."""
        return self.root / "evaluations.json"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    @property
    def page(self) -> Path:
        """What the `plot` command writes for a browser."""
        return self.root / "report.html"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def profile(self) -> Path:
        """Traces and memory snapshots."""
        return self.root / "profile"

    @property
    def logs(self) -> Path:
        """What ranks other than 0 print, and the error of a rank that failed."""
        return self.root / "logs"

    @property
    def everything(self) -> tuple[Path, ...]:
        """All that a run writes; nothing else in the directory is ever moved or removed."""
        return (
            self.config,
            self.metrics,
            self.rollouts,
            self.tensorboard,
            self.wandb,
            self.wandb_id,
            self.checkpoints,
            self.model,
            self.best,
            self.evaluations,
            self.report,
            self.page,
            self.plots,
            self.profile,
            self.logs,
        )


def for_command(config: RunConfig, command: str) -> RunConfig:
    """The config whose run_dir this command writes to: `train` owns run_dir, `eval` and `sft` a folder in it."""
    return config if command == "train" else config.model_copy(update={"run_dir": config.run_dir / command})


def check_run_dir(config: RunConfig, overwrite: bool) -> None:
    """Raise UserError where run_dir is no directory, cannot be written, or holds an earlier run."""
    root = config.run_dir
    if root.exists() and not root.is_dir():
        raise UserError(f"run_dir {root} is a file; name a directory that does not exist yet")
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise UserError(f"run_dir {root} cannot be made, for {existing} is not a writable directory; name another")
    files = RunFiles(root)
    if files.metrics.exists() and not overwrite:
        if config.checkpoint.resume == "auto":
            raise UserError(f"run_dir {root} holds a run without a valid checkpoint; add --overwrite to start it again")
        raise UserError(
            f"run_dir {root} already holds a run; name another or add --overwrite to replace it (or, to `train`, "
            "--resume to go on from its newest checkpoint)"
        )
    if _within(root, config.model.path):
        raise UserError(f"run_dir {root} lies in model.path {config.model.path}, which stays as it is; name another")
    inside = [path for path in files.everything if path.exists() and _within(config.model.path, path)]
    if inside:  # it would be moved aside before the ranks read it
        raise UserError(f"model.path {config.model.path} is part of the run that run_dir {root} holds; name another")


def check_sft_output(config: RunConfig, overwrite: bool) -> None:
    """Raise UserError where sft.output is the model itself, or holds anything that may not be replaced."""
    target = config.sft.output
    if target is None:
        return
    if _within(config.model.path, target) or _within(config.run_dir, target):
        raise UserError(f"sft.output {target} holds the run's model.path or run_dir; name a directory of its own")
    existing = next(p for p in (target, *target.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"sft.output {target} cannot be made, for {existing} is not a writable directory; name another")
    if existing != target or not any(target.iterdir()):
        return
    if not (target / "config.json").is_file():
        raise UserError(f"sft.output {target} holds files that are no model; name a directory that does not exist yet")
    if not overwrite:
        raise UserError(f"sft.output {target} already holds a model; name another or add --overwrite to replace it")


def _within(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class RunDirectory:
    """A run directory that was opened for writing; `keep()` says that the run got under way."""

    def __init__(self, root: Path) -> None:
        self.files = RunFiles(root)
        self._aside = root / f".replaced-{os.getpid()}"
        self._kept = False
        self._made = [p for p in (root, *root.parents) if not p.exists()]

    def keep(self) -> None:
        """The run's results stay and the earlier run is gone."""
        self._kept = True

    def _open(self) -> None:
        self.files.root.mkdir(parents=True, exist_ok=True)
        for path in self.files.everything:
            if path.exists():
                self._aside.mkdir(exist_ok=True)
                path.rename(self._aside / path.name)

    def _close(self) -> None:
        if not self._kept:
            for path in self.files.everything:
                _remove(path)
            for path in self._aside.glob("*"):
                path.rename(self.files.root / path.name)
            _remove(self._aside)
        self._drop_replaced()
        for path in self._made:
            with contextlib.suppress(OSError):  # not empty: someone else's files
                path.rmdir()

    def _drop_replaced(self) -> None:
        """Once a run got under way: remove what it replaced, and what killed launchers had set aside before it."""
        if self._kept:
            for path in self.files.root.glob(".replaced-*"):
                _remove(path)


@contextlib.contextmanager
def open_run_dir(root: Path, *, in_place: bool = False) -> Iterator[RunDirectory]:
    """Make `root`, an earlier run's files set aside; unless `keep()` is called, leaving restores what was there.

    in_place   the run that `root` holds goes on: nothing is set aside, nothing removed
    """
    directory = RunDirectory(root)
    if in_place:
        yield directory
        directory._drop_replaced()
        return
    try:
        directory._open()
    except OSError as error:
        raise UserError(f"run_dir {root} cannot be made ({error.strerror}); name another") from error
    try:
        yield directory
    finally:
        directory._close()
