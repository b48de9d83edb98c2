"""`convert`: a Hugging Face directory into a sharded Megatron checkpoint that any layout loads, and back.

`start` checks and launches the ranks, `run_job` is what each of them does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from megatron_rlvr.checkpoint.manifest import Manifest, check_files, read_manifest
from megatron_rlvr.config.checks import check_layout, check_model
from megatron_rlvr.config.load import build_config, parse_override, with_overrides
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import ExportPlan, HFCheckpoint, Skeleton, WeightMap, read_model_spec
from megatron_rlvr.hf.staging import check_target, remove_partial
from megatron_rlvr.observability.progress import byte_bar
from megatron_rlvr.types import UserError

Direction = Literal["hf-to-megatron", "megatron-to-hf"]

HF_FOLDER = "hf"  # inside a converted checkpoint: companions and weight headers of the model that it came from
_EMBEDDING = "embedding.word_embeddings.weight"
_OVERRIDES = ("actor", "launch", "logging", "model")


class Job(BaseModel):
    """What every rank of a conversion is told.

    config            its model.path is the Hugging Face directory that is read, or that names files and dtypes
    keep_dtype        write the dtype of model.path's weights, else that of actor.dtype
    max_shard_bytes   of a Hugging Face file; None: files as in model.path
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    direction: Direction
    source: Path
    target: Path
    config: RunConfig
    keep_dtype: bool = True
    max_shard_bytes: int | None = None


def start(
    direction: Direction,
    source: Path,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    launch: Callable[..., int],
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> int:
    """Convert on as many local ranks as the layout in `overrides` has; returns their exit code.

    launch      `launch.local.run_local`
    overrides   actor.*, launch.*, logging.* and model.*; actor.dtype is the source's where it is not given

    Raises UserError before anything is written.
    """
    source, target = source.absolute(), target.absolute()
    if direction == "hf-to-megatron":
        job = _plan_from_hf(source, target, overrides)
    else:
        job = _plan_to_hf(source, target, overrides, max_shard_bytes)
    check_target(target, source, _needed_bytes(job), overwrite)
    with tempfile.TemporaryDirectory(prefix="megatron_rlvr_convert_") as folder:
        file = Path(folder) / "job.json"
        file.write_text(job.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "megatron_rlvr._rank", "convert", str(file), folder]
        threads = job.config.launch.threads
        code = launch(command, job.config.actor.world_size, threads=threads, log_dir=Path(folder))
    if code != 0:
        remove_partial(target)
    return code


def run_job(file: Path) -> None:
    """This rank's part of the conversion that `file` describes."""
    job = Job.model_validate_json(file.read_text(encoding="utf-8"))
    if job.direction == "hf-to-megatron":
        hf_to_megatron(job)
    else:
        megatron_to_hf(job)


def hf_to_megatron(job: Job, keep_process_group: bool = False) -> None:
    """Load job.source and save it as a distributed checkpoint that knows its Hugging Face files; a collective."""
    from megatron_rlvr.actor.weights_only import WeightsOnly
    from megatron_rlvr.checkpoint.model_weights import save_model_weights
    from megatron_rlvr.refresh import load_weights

    config, checkpoint = job.config, HFCheckpoint(job.source)
    spec = read_model_spec(job.source)
    model = WeightsOnly(spec, config.actor)
    with _bar(job, "load", model.num_bytes) as bar:
        load_weights(
            model,
            checkpoint,
            WeightMap(spec, vocab_multiple=config.actor.tensor_parallel),
            broadcast=config.model.broadcast_load,
            progress=bar.update,
        )
    skeleton = Skeleton.of(checkpoint)
    save_model_weights(
        job.target,
        model.chunks,
        config.actor,
        beside=lambda directory: skeleton.save(directory / HF_FOLDER),
        overwrite=True,  # `start` has looked at what is there
    )
    model.close(keep_process_group)


def megatron_to_hf(job: Job, keep_process_group: bool = False) -> None:
    """Load the weights of job.source, of whatever layout, and write them as a Hugging Face directory; a collective."""
    from megatron_rlvr.actor.model import DTYPES
    from megatron_rlvr.actor.weights_only import WeightsOnly
    from megatron_rlvr.checkpoint.model_weights import load_model_weights
    from megatron_rlvr.refresh import export_checkpoint

    config, skeleton = job.config, _skeleton(job)
    spec = read_model_spec(skeleton.path)
    model = WeightsOnly(spec, config.actor)
    load_model_weights(job.source, model.chunks)
    plan = ExportPlan.of(skeleton, None if job.keep_dtype else DTYPES[config.actor.dtype], job.max_shard_bytes)
    weight_map = WeightMap(spec, vocab_multiple=config.actor.tensor_parallel)
    with _bar(job, "export", model.num_bytes) as bar:
        export_checkpoint(model, weight_map, plan, job.target, overwrite=True, progress=bar.update)
    model.close(keep_process_group)


def _plan_from_hf(source: Path, target: Path, overrides: Sequence[str]) -> Job:
    if any(parse_override(text)[0] == ("model", "path") for text in overrides):
        raise UserError("model.path plays no part in hf-to-megatron, which reads HF_DIR; leave it out.")
    spec = read_model_spec(source)
    checkpoint = HFCheckpoint(source)
    checkpoint.check_complete(spec)
    dtype = "bf16" if checkpoint.uniform_dtype() == torch.bfloat16 else "float32"
    config = _config(source, target, overrides, dtype)
    _check_layout(config)
    return Job(direction="hf-to-megatron", source=source, target=target, config=config)


def _plan_to_hf(source: Path, target: Path, overrides: Sequence[str], max_shard_bytes: int | None) -> Job:
    manifest = read_manifest(source)
    check_files(source, manifest)
    named = any(parse_override(text)[0] == ("model", "path") for text in overrides)
    model = _model_of(source, manifest)
    if model is None and not named:
        raise UserError(
            f"{source} does not hold the Hugging Face files of its model, and the directory that its run began with is "
            "not there; add model.path=HF_DIR."
        )
    config = _config(model or source, target, overrides, manifest.layout["dtype"])
    _check_layout(config)
    _check_embedding(source, manifest, config)
    given = any(parse_override(text)[0] == ("actor", "dtype") for text in overrides)
    return Job(
        direction="megatron-to-hf",
        source=source,
        target=target,
        config=config,
        keep_dtype=model == source / HF_FOLDER and not named and not given,
        max_shard_bytes=max_shard_bytes,
    )


def _check_embedding(source: Path, manifest: Manifest, config: RunConfig) -> None:
    """Refuse another model's files: dist_checkpointing reads an embedding of any height without a word."""
    spec, parts = read_model_spec(config.model.path), manifest.layout["tensor_parallel"]
    expected = (-(-spec.vocab_size // parts) * parts, spec.hidden_size)
    stored = manifest.tensors.get(_EMBEDDING)
    if stored is None or stored.shape != expected:
        raise UserError(
            f"{source} holds {_EMBEDDING} {list(stored.shape) if stored else 'nowhere'}, but the config.json of "
            f"{config.model.path} asks for {list(expected)}; let model.path name the model that it was made from."
        )


def _model_of(source: Path, manifest: Manifest) -> Path | None:
    """The directory that knows a checkpoint's Hugging Face files: its own folder, or the model its run began with."""
    began = manifest.details.get("config", {}).get("model", {}).get("path")
    found = [
        path for path in (source / HF_FOLDER, Path(began) if began else None) if path is not None and path.is_dir()
    ]
    return found[0] if found else None


def _config(model: Path, target: Path, overrides: Sequence[str], dtype: str) -> RunConfig:
    for text in overrides:
        path, _ = parse_override(text)
        if path[0] not in _OVERRIDES:
            raise UserError(f"{'.'.join(path)} plays no part in a conversion; set keys of {', '.join(_OVERRIDES)}.")
    tree: dict[str, Any] = {
        "run_dir": str(target),
        "model": {"path": str(model)},
        "data": {},
        "actor": {"dtype": dtype},
    }
    return build_config(with_overrides(tree, overrides))


def _check_layout(config: RunConfig) -> None:
    check_layout(config.actor)
    check_model(config, read_model_spec(config.model.path), "sft")


def _skeleton(job: Job) -> Skeleton:
    path = job.config.model.path
    if path == job.source / HF_FOLDER:
        return Skeleton.read(path)
    return Skeleton.of(HFCheckpoint(path))


def _needed_bytes(job: Job) -> int:
    if job.direction == "hf-to-megatron":
        return HFCheckpoint(job.source).tensor_bytes()
    return ExportPlan.of(_skeleton(job), None, None).tensor_bytes * (1 if job.keep_dtype else 2)


def _bar(job: Job, what: str, num_bytes: int) -> Any:
    return byte_bar(num_bytes, what, shown=job.config.logging.progress and dist.get_rank() == 0)
