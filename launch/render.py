"""Job scripts from their templates in slurm/, which a person can read before and after."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from launch.attempts import FINISHED
from launch.cluster import ClusterProfile, expanded
from launch.ranks import REQUEUE
from launch.secrets import refuse_secrets_in_text
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATES = REPOSITORY / "slurm"
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


@dataclass(frozen=True)
class Placement:
    """nodes x tasks_per_node ranks."""

    nodes: int
    tasks_per_node: int


def place(world_size: int, gpus_per_node: int, nodes: int | None) -> Placement:
    """Spread the ranks of a layout evenly over `nodes` nodes; default: as few as hold them so.

    Raises UserError where they cannot be spread over that many.
    """
    fewest = next(n for n in range(1, world_size + 1) if world_size % n == 0 and world_size // n <= gpus_per_node)
    wanted = fewest if nodes is None else nodes
    if world_size % wanted or world_size // wanted > gpus_per_node:
        raise UserError(
            f"--nodes is {wanted}, over which the layout's {world_size} ranks cannot be spread evenly with at most "
            f"{gpus_per_node} a node; give --nodes {fewest} or change the layout, such as actor.data_parallel"
        )
    return Placement(wanted, world_size // wanted)


def job_name(config: RunConfig) -> str:
    """The run's name as SLURM takes it; a chain of jobs shares it, so runs that chain need names of their own."""
    return _NAME.sub("_", config.name)


def common_variables(config: RunConfig, profile: ClusterProfile, *, cpu: bool = False) -> dict[str, Any]:
    """What every template may use."""
    runtime = profile.runtime
    return {
        "name": job_name(config),
        "run_dir": str(config.run_dir),
        "repository": str(REPOSITORY),
        "directives": profile.queue_options(cpu=cpu),
        "signal_seconds": 0 if cpu else profile.signal_seconds,
        "requeue": profile.requeue,
        "setup": profile.setup,
        "environment": profile.exports(),
        "threads": config.launch.threads,
        "python": runtime.python_words(),
        "container": runtime.container_words(),
        "once": runtime.once_words(),
        "codes": {"finished": FINISHED, "requeue": REQUEUE},
    }


def rank_command(command: str) -> str:
    """The arguments of Python that run one rank; config and log directory follow."""
    return f"-m megatron_rlvr._rank {command}"


def render(template: str, variables: Mapping[str, Any], directory: Path = TEMPLATES) -> str:
    """The job script of a template.

    Raises UserError where the template, or one that it includes, holds a secret, does not exist, or uses a variable
    that is not there.
    """
    for source in (directory / template, *sorted((directory / "parts").glob("*.j2"))):
        if source.is_file():
            refuse_secrets_in_text(source.read_text(encoding="utf-8"), str(source))
    engine = Environment(
        loader=FileSystemLoader(directory),
        undefined=StrictUndefined,
        comment_start_string="{%#",  # the usual one is in ${#array[@]}
        comment_end_string="#%}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters.update(quoted=_quoted, expanded=expanded)
    try:
        script = engine.get_template(template).render(**variables)
    except TemplateError as error:
        name = type(error).__name__
        raise UserError(f"template {directory / template} cannot be rendered ({name}: {error}); correct it") from None
    refuse_secrets_in_text(script, f"the script of {template}")
    return script
