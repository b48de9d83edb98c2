"""One rank: for every layout, the same mini-batch through one update; rank 0 writes what the test compares.

python -m tests.parallel.update_worker JOB.json  (JOB: config, batch, output, losses, layouts)
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rlvr.config.tree import LossConfig, RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner


def merged(learner: Learner, pairs) -> dict[str, torch.Tensor]:
    """Whole tensors under Hugging Face names."""
    return {
        name: tensor.clone().contiguous()
        for canonical, shards in pairs
        for name, tensor in learner.weight_map.merge(canonical, shards)
    }


def run_layout(job: dict, name: str, overrides: dict) -> None:
    base = job["config"]
    config = RunConfig.model_validate({**base, "actor": {**base["actor"], **overrides}})
    learner = Learner(config, updates=10)
    actor = learner.actor
    with open(job["batch"], "rb") as file:  # written by the test itself
        trajectories = pickle.load(file)
    results: dict = {"losses": {}}
    for loss in job["losses"]:
        settings = LossConfig.model_validate(loss)
        mini_batch = build_mini_batch(trajectories, **learner.batch_options())
        for batch in mini_batch.micro_batches:  # a reference policy near the sampler, the same for a token anywhere
            batch.reference_logprobs = batch.behavior_logprobs + 0.05 * torch.sin(batch.labels.float())
        metrics = actor.accumulate(mini_batch, settings)
        key = f"{settings.name}-{settings.aggregation}"
        results["losses"][key] = metrics
        if not config.actor.distributed_optimizer:
            gradients = merged(learner, actor.gradients())
            if dist.get_rank() == 0:
                save_file(gradients, f"{job['output']}/{name}.{key}.gradients.safetensors")
    results["step"] = actor.step()
    results["spread"] = actor.replica_spread()
    weights = merged(learner, actor.weights())
    if dist.get_rank() == 0:
        save_file(weights, f"{job['output']}/{name}.weights.safetensors")
        Path(f"{job['output']}/{name}.json").write_text(json.dumps(results))
    dist.barrier()
    learner.actor.close(keep_process_group=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name, overrides in job["layouts"].items():
        run_layout(job, name, overrides)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
