"""Nsight Systems around the ranks that a run's `profile` section chooses."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

# CUDA calls and NVTX ranges only (sampling costs time and floods the report), from cudaProfilerStart to Stop; the run
# goes on when the capture ends.
FLAGS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--kill=none",
    "--force-overwrite=true",
)

Wrap = Callable[[int, Sequence[str]], list[str]]


def nsys_command(command: Sequence[str], directory: Path, rank: int | str, *, job: str, node: str) -> list[str]:
    """`command` under nsys, with a report named by job, node and rank.

    rank, job, node   values, or what nsys fills in itself: `%q{VARIABLE}` of its environment, `%h` for the host
    """
    output = directory / f"{job}_{node}_rank{rank}"
    return ["nsys", "profile", *FLAGS, f"--output={output}", *command]


def rank_wrapper(config: RunConfig, *, job: str | None = None, node: str | None = None) -> Wrap | None:
    """(rank, command) -> the command to start that rank with; None where no rank is wrapped.

    job, node   default: SLURM_JOB_ID or "local", and this host's name

    Raises UserError when nsys is wanted but not installed.
    """
    profile = config.profile
    if profile.tool != "nsys":
        return None
    if shutil.which("nsys") is None:
        raise UserError(
            "profile.tool is nsys, but nsys is not on PATH; install NVIDIA Nsight Systems or set profile.tool=torch"
        )
    directory = RunFiles(config.run_dir).profile
    names = {
        "job": job or os.environ.get("SLURM_JOB_ID", "local"),
        "node": node or socket.gethostname(),
    }

    def wrap(rank: int, command: Sequence[str]) -> list[str]:
        if rank not in profile.ranks:
            return list(command)
        directory.mkdir(parents=True, exist_ok=True)  # nsys makes the file, not its directory
        return nsys_command(command, directory, rank, **names)

    return wrap
