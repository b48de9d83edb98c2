"""Which settings a run may change when it goes on from a checkpoint, and which would make it another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

# What decides where and how fast a run computes, how long it goes on and what it shows: sections and single keys.
FREE = (
    "name",
    "run_dir",
    "logging",
    "checkpoint",
    "launch",
    "sft",
    "profile",
    "model.broadcast_load",
    "data.validation",
    "data.held_out",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.virtual_pipeline",
    "actor.context_parallel",
    "actor.expert_parallel",
    "actor.expert_tensor_parallel",
    "actor.data_parallel",
    "actor.distributed_optimizer",
    "actor.batch_layout",
    "actor.micro_batch_tokens",
    "actor.recompute",
    "rollout.max_num_seqs",
    "rollout.kv_cache_gb",
    "rollout.memory_utilization",
    "rollout.enforce_eager",
    "trainer.updates",
    "trainer.eval_interval",
    "trainer.eval_samples",
    "trainer.eval_problems",
    "trainer.best_by",
    "trainer.save_best",
    "trainer.save_interval",
    "trainer.step_zero_tolerance",
)


def config_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now) of every leaf that differs; None for a key that one side lacks."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [*old, *(key for key in new if key not in old)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def check_same_run(before: Mapping[str, Any], config: RunConfig, step: int) -> None:
    """Refuse to go on with another run's settings.

    before   the resolved config of the checkpoint
    step     updates that the checkpoint has done
    Raises UserError naming the first key that may not change, or trainer.updates below `step`.
    """
    known = dict(_leaves(before))
    for key, (old, new) in config_differences(before, config.model_dump(mode="json")).items():
        if key in known and not _free(key):  # a key that the checkpoint's release did not have decided nothing
            raise UserError(
                f"{key} was {old!r} in the checkpoint and is now {new!r}, which makes it another run; set it back, or "
                "start a new run with model.path naming an exported model"
            )
    if config.trainer.updates < step:
        raise UserError(
            f"trainer.updates is {config.trainer.updates}, but the checkpoint has done {step} updates; raise it"
        )


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
