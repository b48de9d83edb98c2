"""Supervised warm-up: the same actor, batches and schedules as RL, with the `sft` loss on written responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import LossConfig, RunConfig
from megatron_rlvr.data import PromptCursor, build_mini_batch, load_demonstrations, load_tokenizer
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.learner import Learner
from megatron_rlvr.observability.reporter import Reporter
from megatron_rlvr.types import MiniBatch, Trajectory, UserError


def sft(config: RunConfig) -> None:
    """Train on `sft.demonstrations` for `sft.updates` updates and write the model to `sft.output`."""
    demonstrations = _demonstrations(config)
    settings = config.optimizer.model_copy(update={"lr": config.sft.lr})
    config = config.model_copy(update={"optimizer": settings, "loss": LossConfig(name="sft")})
    learner = Learner(config, updates=config.sft.updates)
    target = config.sft.output or RunFiles(config.run_dir).model
    with Reporter(config.run_dir, config, dist.get_rank() == 0, updates=config.sft.updates) as reporter:
        for mini_batch in _mini_batches(config, demonstrations, learner.batch_options()):
            with reporter.timer("update_actor"):
                metrics = learner.actor.update(mini_batch, config.loss)
            reporter.log(learner.actor.version, {**metrics, "actor/loss": metrics["actor/pg_loss"]})
        learner.save(target)
    if dist.get_rank() == 0:
        print(f"wrote {target}")
    learner.close()


def _demonstrations(config: RunConfig) -> list[Trajectory]:
    if config.sft.demonstrations is None:
        raise UserError("sft.demonstrations is not set; name a JSONL file with problems and responses.")
    data, spec = config.data, read_model_spec(config.model.path)
    return load_demonstrations(
        config.sft.demonstrations,
        load_tokenizer(config.model.path),
        prompt_key=data.prompt_key,
        response_key=config.sft.response_key,
        **data.prompt_options,
        max_tokens=min(spec.max_position_embeddings, config.actor.micro_batch_tokens),
    )


def _mini_batches(
    config: RunConfig, demonstrations: list[Trajectory], batch_options: dict[str, Any]
) -> Iterator[MiniBatch]:
    cursor = PromptCursor(len(demonstrations), config.seed)
    for _ in range(config.sft.updates):
        chosen = [demonstrations[index] for index in cursor.take(config.sft.batch_size)]
        yield build_mini_batch(chosen, **batch_options)
