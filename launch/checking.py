"""Checks of a job before it costs anything: the config, the plan, and the script as the shell and SLURM read it."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError


def config_notes(config: RunConfig, command: str, *, requeue: bool) -> Iterator[str]:
    """What is allowed on a cluster, but rarely meant."""
    if command == "train" and config.checkpoint.interval is None:
        yield (
            "checkpoint.interval is unset, so a run that loses a node starts over; set it to a few rollout batches "
            f"(checkpoint.interval={10 * config.trainer.rollout_reuse})"
        )
    if not requeue and command == "train":
        yield "the profile's requeue is false: the run stops at its time limit unless --chain goes on"


def plan_text(config: RunConfig, gpu: str | None, nodes: int) -> str:
    """What the planner says of memory and time. Raises UserError where the layout does not fit the GPUs."""
    if gpu is None:
        return "the profile names no gpu: memory and time are not planned"
    if importlib.util.find_spec("launch.plan") is None:
        return "there is no planner here: memory and time are not planned"
    planner, report = importlib.import_module("launch.plan.planner"), importlib.import_module("launch.plan.report")
    plan = planner.make_plan(config, gpu, nodes)
    if not plan.fits:
        raise UserError(f"{config.name} {report.verdict(plan)}")
    return str(report.render(plan))


def check_shell(script: Path) -> list[str]:
    """`bash -n`, and shellcheck where it is installed; what was checked, a line each.

    Raises UserError with the first complaint.
    """
    notes = [_check(["bash", "-n", str(script)], f"bash -n {script}")]
    if shutil.which("shellcheck"):
        _check(["shellcheck", "--severity=error", "--format=gcc", str(script)], "shellcheck")
        said = subprocess.run(
            ["shellcheck", "--severity=warning", "--format=gcc", str(script)], capture_output=True, text=True
        )
        notes.append(f"shellcheck: {said.stdout.strip() or 'nothing to complain of'}")
    else:
        notes.append("shellcheck is not installed: left out")
    return notes


def check_slurm(script: Path, *options: str) -> str:
    """`sbatch --test-only`: what SLURM says of the job, or that there is no SLURM here."""
    if not shutil.which("sbatch"):
        return "sbatch is not on this machine: the job was not tested against a cluster"
    return _check(["sbatch", "--test-only", *options, str(script)], "sbatch --test-only")


def _check(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    if done.returncode != 0:
        raise UserError(f"{what} refused the job: {' '.join(said[:3])}; correct the template, the profile or --nodes")
    return f"{what}: {said[-1] if said else 'nothing to complain of'}"
