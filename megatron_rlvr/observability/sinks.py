"""Where metrics go: a JSONL file, TensorBoard events, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

Numbers = Mapping[str, float | int | None]


class Sink(Protocol):
    """Takes one step's metrics; None stands for a value that is not finite."""

    def write(self, step: int, metrics: Numbers) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One line per step in metrics.jsonl, on the disk as soon as it is complete."""

    def __init__(self, files: RunFiles) -> None:
        self._file = open(files.metrics, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by close()

    def write(self, step: int, metrics: Numbers) -> None:
        self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalar events under tensorboard/; values that are not finite are left out."""

    def __init__(self, files: RunFiles, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if after is None else after + 1
        self._writer = SummaryWriter(str(files.tensorboard), purge_step=purge_step)

    def write(self, step: int, metrics: Numbers) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, offline where there is no WANDB_API_KEY; its id stays in the run directory."""

    def __init__(self, files: RunFiles, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("logging.wandb is true, but wandb is not installed; install it or leave it off") from None
        self._run = wandb.init(
            project=config.logging.project,
            name=config.name,
            id=_run_id(files),
            resume="allow",
            dir=str(files.root),
            config=config.model_dump(mode="json"),
            mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, metrics: Numbers) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(files: RunFiles) -> str:
    if files.wandb_id.exists():
        return files.wandb_id.read_text(encoding="utf-8").strip()
    identity = uuid.uuid4().hex[:8]
    files.wandb_id.write_text(identity + "\n", encoding="utf-8")
    return identity


def open_sinks(config: RunConfig, after: int | None = None) -> list[Any]:
    """JSONL always, TensorBoard wherever it is installed (a bare GPU image may lack it), wandb by `logging.wandb`.

    after   the update that the run goes on from: TensorBoard hides what was logged past it
    """
    files = RunFiles(config.run_dir)
    files.root.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(files)]
    if importlib.util.find_spec("tensorboard") is not None:
        sinks.append(TensorBoardSink(files, after))
    else:
        print("tensorboard is not installed, so metrics go to metrics.jsonl alone; pip install it", file=sys.stderr)
    if config.logging.wandb:
        sinks.append(WandbSink(files, config))
    return sinks
