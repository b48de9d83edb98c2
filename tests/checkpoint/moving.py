"""A checkpoint's journey through three layouts, and what each holds: whole tensors gathered by the shard plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rlvr.checkpoint.training import Checkpoints
from megatron_rlvr.config.tree import LossConfig, RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner
from megatron_rlvr.types import Trajectory

# saved in the first, carried on through the second, read in the third
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp2_ep2_distributed_optimizer": {
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "data_parallel": 2,
        "distributed_optimizer": True,
    },
    "ep2_dp4": {"expert_parallel": 2, "data_parallel": 4},
}
VOCAB = 131


def config(folder: Path, name: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / name),
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "unused")},
            "actor": {"dtype": "bf16", "micro_batch_tokens": 256, **LAYOUTS[name]},
            "optimizer": {"lr": 1e-3, "warmup_fraction": 0.5, "schedule": "linear"},
            "trainer": {"updates": 10},
        }
    )


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(3)
    batch = []
    for index in range(8):
        ids = rng.integers(0, VOCAB, 12).astype(np.int32)
        mask = np.arange(12) >= 4
        batch.append(
            Trajectory(
                token_ids=ids,
                action_mask=mask,
                behavior_logprobs=np.zeros(12, np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                finish_reason="length",
                advantage=[1.0, -0.5][index % 2],
            )
        )
    return batch


def update(learner: Learner) -> dict[str, float]:
    return learner.actor.update(build_mini_batch(trajectories(), **learner.batch_options()), LossConfig(name="pg"))


def whole(learner: Learner, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the learner's parameters under Hugging Face names, gathered as a weight push gathers weights."""
    for name, shards in learner.actor._plan.gather(value, torch.float32):
        yield from learner.weight_map.merge(name, shards)


def held(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights, master weights, moments and reference of a learner whose optimizer shards nothing."""
    adams = [part.optimizer for part in getattr(learner.actor.optimizer, "chained_optimizers")]  # noqa: B009
    states = {parameter: state for adam in adams for parameter, state in adam.state.items()}
    reference = learner.actor.reference
    assert reference is not None
    kinds: dict[str, Callable[[Any], torch.Tensor]] = {
        "weight": lambda parameter: parameter.data,
        "master": lambda parameter: getattr(parameter, "main_param", parameter),
        "exp_avg": lambda parameter: states[getattr(parameter, "main_param", parameter)]["exp_avg"],
        "exp_avg_sq": lambda parameter: states[getattr(parameter, "main_param", parameter)]["exp_avg_sq"],
        "reference": reference.frozen,
    }
    found = {f"{kind}/{name}": t.clone() for kind, value in kinds.items() for name, t in whole(learner, value)}
    steps = {float(state["step"]) for state in states.values()}
    own = {id(state["step"]) for state in states.values()}
    assert len(own) == len(states), "parameters share a step tensor: each step would count once per parameter"
    return found | {"steps": torch.tensor(sorted(steps))}


def numbers(learner: Learner) -> dict[str, float]:
    return {
        "version": learner.actor.version,
        "reference_version": learner.actor.reference_version,
        "lr": learner.actor.optimizer.param_groups[0]["lr"],
    }


def move(folder: Path) -> None:
    """Two updates in the first layout with the reference of version 1; save; load, save; load."""
    results: dict[str, dict[str, float]] = {}
    before: Path | None = None
    for name in LAYOUTS:
        learner = Learner(config(folder, name), updates=10)
        checkpoints = Checkpoints(learner.config, learner.actor)
        if before is None:
            update(learner)
            learner.actor.refresh_reference()
            update(learner)
        else:
            assert checkpoints.restore(before) == {"kept": [1, None, "x"]}
        results[name] = numbers(learner)
        if not learner.config.actor.distributed_optimizer:
            tensors = held(learner)
            if dist.get_rank() == 0:
                save_file(tensors, folder / f"{name}.safetensors")
        if name != "ep2_dp4":
            before = checkpoints.save({"kept": [1, None, "x"]}, lambda directory: None)
        results[name] |= {"next_grad_norm": update(learner)["actor/grad_norm"]}
        learner.actor.close(keep_process_group=True)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()
