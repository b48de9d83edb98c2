"""The kinds of jobs: each checked, rendered into its run directory and described; nothing is submitted here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from launch.attempts import History, write_history
from launch.checking import check_shell, check_slurm, config_notes, plan_text
from launch.cluster import ClusterProfile
from launch.git_state import git_state
from launch.render import REPOSITORY, TEMPLATES, common_variables, job_name, place, rank_command, render
from launch.submission import JobRecord, SubmissionFiles
from megatron_rlvr.config.checks import Command
from megatron_rlvr.config.load import build_config, dump_config, parse_override, save_resolved, with_overrides
from megatron_rlvr.config.run_dir import RunFiles, for_command, open_run_dir
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

# kind of job -> template, and what its ranks do
KINDS = {
    "train": ("train_colocated.sbatch.j2", "train"),
    "sft": ("train_colocated.sbatch.j2", "sft"),
    "eval": ("eval.sbatch.j2", "eval"),
    "sweep": ("sweep.sbatch.j2", "train"),
    "disaggregated": ("train_disaggregated.sbatch.j2", "train"),
    "convert": ("convert.sbatch.j2", "convert"),
}


@dataclass(frozen=True)
class Request:
    """One job as it was asked for.

    sweep    KEY=V1,V2,... each; the runs are all combinations
    nodes    of the ranks; default: as few as hold the layout
    submit   False: render and check only, so that an earlier run in run_dir stays
    rank_arguments, server_arguments   of Python, instead of this package's rank and vLLM's server
    """

    kind: str
    config: RunConfig
    profile: ClusterProfile
    nodes: int | None = None
    overwrite: bool = False
    sweep: tuple[str, ...] = ()
    at_once: int | None = None
    rollout_nodes: int = 1
    rollout_tensor_parallel: int = 1
    conversion: str = "hf-to-megatron"
    source: Path | None = None
    target: Path | None = None
    chain: int = 1
    templates: Path = TEMPLATES
    submit: bool = False
    rank_arguments: str | None = None
    server_arguments: str | None = None

    @property
    def command(self) -> str:
        return KINDS[self.kind][1]

    @property
    def run_config(self) -> RunConfig:
        """The config with the run directory that this command writes to."""
        return for_command(self.config, self.command)

    @property
    def run_dir(self) -> Path:
        return self.run_config.run_dir


def sweep_runs(request: Request) -> list[RunConfig]:
    """One config per combination of the swept values, each with a name and run directory of its own."""
    if not request.sweep:
        raise UserError("--job sweep needs at least one --sweep section.key=value,value,...")
    axes = []
    for text in request.sweep:
        key, _, values = text.partition("=")
        if not all(values.split(",")):
            raise UserError(f"--sweep is {text}; give it as section.key=value,value,...")
        axes.append([f"{key}={value}" for value in values.split(",")])
    tree = request.config.model_dump(mode="json")
    return [_sweep_run(tree, request.config, overrides) for overrides in itertools.product(*axes)]


def _sweep_run(tree: dict[str, Any], base: RunConfig, overrides: Sequence[str]) -> RunConfig:
    values = [f"{parse_override(text)[0][-1]}-{text.partition('=')[2]}" for text in overrides]
    label = "_".join(value.replace("/", "-") for value in values)
    extra = [f"name={base.name}_{label}", f"run_dir={json.dumps(str(base.run_dir / label))}"]
    return build_config(with_overrides(json.loads(json.dumps(tree)), [*overrides, *extra]))


# Variables of the templates


def _rank_variables(request: Request) -> dict[str, Any]:
    placement = place(request.config.actor.world_size, request.profile.gpus_per_node, request.nodes)
    ranks = request.rank_arguments or rank_command(request.command)
    profile = request.config.profile
    nsys = f"--nsys={','.join(map(str, profile.ranks))} " if profile.tool == "nsys" else ""
    return asdict(placement) | {"command": request.command, "rank_command": nsys + ranks}


def _rollout_variables(request: Request) -> dict[str, Any]:
    tensor, gpus = request.rollout_tensor_parallel, request.profile.gpus_per_node
    if gpus % tensor:
        raise UserError(f"--rollout-tensor-parallel is {tensor}, which does not divide the {gpus} GPUs of a node")
    model, rollout = request.config.model.path, request.config.rollout
    server = (
        f"-m vllm.entrypoints.openai.api_server --model {json.dumps(str(model))} --tensor-parallel-size {tensor} "
        f"--gpu-memory-utilization {rollout.memory_utilization:g} --max-num-seqs {rollout.max_num_seqs}"
    )
    return {
        "rollout_nodes": request.rollout_nodes,
        "rollout_tasks_per_node": gpus // tensor,
        "rollout_tensor_parallel": tensor,
        "rollout_command": request.server_arguments or server,
        "het": True,
    }


def _convert_variables(request: Request) -> dict[str, Any]:
    actor = request.config.actor
    sizes = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel")
    return {
        "conversion": request.conversion,
        "source": request.source or request.config.model.path,
        "target": request.target or request.run_dir / request.conversion,
        "layout": [f"actor.{size}={getattr(actor, size)}" for size in sizes if getattr(actor, size) > 1],
        "overwrite": request.overwrite,
    }


def variables(request: Request, runs: Sequence[RunConfig]) -> dict[str, Any]:
    """All that the template of this job may use."""
    found = common_variables(request.run_config, request.profile, cpu=request.kind == "convert")
    if request.kind == "convert":
        return found | _convert_variables(request)
    found |= _rank_variables(request)
    if request.kind == "disaggregated":
        found |= _rollout_variables(request)
    if request.kind == "sweep":
        found |= {"array": {"size": len(runs), "at_once": request.at_once}}
    return found


# Rendering


def _check_runs(request: Request, runs: Sequence[RunConfig]) -> None:
    """The checks of the command line's own `train`, but for this machine's devices. Raises UserError."""
    from megatron_rlvr.cli import check_run

    for config in runs:
        check_run(config, cast(Command, request.command), request.overwrite or _goes_on(request, config))


def _goes_on(request: Request, config: RunConfig) -> bool:
    from megatron_rlvr.cli import goes_on_in_place

    return request.command == "train" and goes_on_in_place(config)


def _write_run(request: Request, config: RunConfig, ranks: str) -> None:
    """Everything that the attempts of one run read."""
    files = SubmissionFiles(config.run_dir)
    files.root.mkdir(parents=True, exist_ok=True)
    save_resolved(config, files.config)
    files.write_job(JobRecord(job_name(config), ranks, str(files.script)))
    write_history(config.run_dir, History(max_crashes=request.profile.max_crashes))


def _set_aside(request: Request, runs: Sequence[RunConfig]) -> None:
    """Remove the runs that --overwrite replaces, once nothing can refuse the new ones any more."""
    for config in runs:
        if RunFiles(config.run_dir).metrics.exists() and not _goes_on(request, config):
            with open_run_dir(config.run_dir) as directory:
                directory.keep()


def _describe(request: Request, values: dict[str, Any], runs: Sequence[RunConfig]) -> Iterator[str]:
    files = SubmissionFiles(request.run_dir)
    if request.kind == "convert":
        yield f"{request.conversion}: {values['source']} -> {values['target']}, {request.profile.cpu_cores} cores"
    else:
        count = f"{len(runs)} runs of " if request.kind == "sweep" else ""
        size = f"{values['nodes']} node(s) x {values['tasks_per_node']} rank(s)"
        yield f"{request.command} {request.config.name}: {count}{size}"
    if request.kind == "disaggregated":
        yield (
            f"rollout: {values['rollout_nodes']} node(s) x {values['rollout_tasks_per_node']} vLLM server(s) of "
            f"{values['rollout_tensor_parallel']} GPU(s)"
        )
    yield f"cluster {request.profile.name}: {' '.join(values['directives'])}"
    state = git_state(REPOSITORY)
    yield f"code: commit {state.commit}{f', with changes {(state.diff_sha256 or str())[:12]}' if state.dirty else ''}"
    yield f"script: {files.script}"


def prepare(request: Request) -> list[str]:
    """Check, render and test the job; the lines of the plan. Raises UserError before anything of a run is touched."""
    if request.kind == "disaggregated" and request.submit:
        raise UserError(
            "--job disaggregated cannot be submitted yet, for the trainer does not reach vLLM on other nodes; use "
            "--dry-run, or --job train"
        )
    runs = sweep_runs(request) if request.kind == "sweep" else [request.run_config]
    if request.kind != "convert":
        _check_runs(request, runs)
    values = variables(request, runs)
    script = render(KINDS[request.kind][0], values, request.templates)
    planned = "" if request.kind == "convert" else plan_text(request.config, request.profile.gpu, values["nodes"])
    files = SubmissionFiles(request.run_dir)
    _write_all(request, files, runs, script)
    lines = [*_describe(request, values, runs), *check_shell(files.script), check_slurm(files.script)]
    notes = config_notes(request.config, request.command, requeue=request.profile.requeue)
    lines += [f"note: {note}" for note in notes]
    lines += [planned] if planned else []
    files.plan.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if request.submit and request.kind != "convert":
        _set_aside(request, runs)
    return lines


def _write_all(request: Request, files: SubmissionFiles, runs: Sequence[RunConfig], script: str) -> None:
    for config in runs:
        _write_run(request, config, request.command)
    _write_run(request, request.run_config, request.command)
    write_whole(files.script, script.encode())
    write_whole(files.profile, dump_config(request.profile).encode())
    write_whole(files.git, (json.dumps(asdict(git_state(REPOSITORY)), indent=1) + "\n").encode())
    if request.kind == "sweep":
        write_whole(files.sweep, "".join(f"{config.run_dir}\n" for config in runs).encode())
