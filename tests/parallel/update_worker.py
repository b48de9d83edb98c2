"""One rank: for every layout, the same mini-batch through one update; rank 0 writes what the tests compare.

python -m tests.parallel.update_worker JOB.json ...  (JOB: config, folder, losses, with_reference, layouts; the layout
`one` comes first, in a launch of one rank)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.config.tree import LossConfig, RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner
from megatron_rlvr.types import MiniBatch
from tests.parallel.compare import worst_relative
from tests.parallel.matrix import load_batch


def merged(learner: Learner, pairs: Any) -> dict[str, torch.Tensor]:
    """Whole tensors under Hugging Face names."""
    return {
        name: tensor.clone().contiguous()
        for canonical, shards in pairs
        for name, tensor in learner.weight_map.merge(canonical, shards)
    }


def gradient_error(learner: Learner, reference: Path) -> float:
    """Largest relative difference, on any rank, of this rank's own slices from those of the whole gradients."""
    with safe_open(reference, framework="pt") as file:

        def read(name: str, slices: Any) -> torch.Tensor:
            return file.get_slice(name)[slices]

        found = dict(named_parameters(learner.actor.chunks))
        place = learner.actor.place
        expected = {name: learner.weight_map.local_tensor(name, read, place) for name in found}
    worst = torch.tensor(worst_relative({name: p.main_grad for name, p in found.items()}, expected))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def sequence_logprobs(learner: Learner, mini_batch: MiniBatch) -> dict[str, list[float]]:
    """Log-probs of the action tokens of every response, which its token ids name."""
    mine: dict[str, list[float]] = {}
    for batch, (logprobs, _) in zip(mini_batch.micro_batches, learner.actor.logprobs(mini_batch), strict=True):
        sizes = batch.action_cu_seqlens.diff().tolist()
        for ids, values in zip(batch.labels.split(sizes), logprobs.split(sizes), strict=True):
            mine[str(ids.tolist())] = values.tolist()
    everyone: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(everyone, mine, group=parallel_state.get_data_parallel_group())
    return {ids: values for part in everyone for ids, values in part.items() if ids != "[]"}


def run_layout(job: dict, name: str, overrides: dict) -> None:
    base, folder = job["config"], Path(job["folder"])
    config = RunConfig.model_validate({**base, "actor": {**base["actor"], **overrides}})
    learner = Learner(config, updates=10)
    actor, first = learner.actor, next(iter(job["losses"]))
    trajectories = load_batch(folder)
    if "shuffled" in name:
        trajectories = [trajectories[i] for i in np.random.default_rng(5).permutation(len(trajectories))]
    mini_batch = build_mini_batch(trajectories, **learner.batch_options())
    results: dict = {"losses": {}, "gradient_errors": {}, "logprobs": sequence_logprobs(learner, mini_batch)}
    for key, loss in job["losses"].items():
        for batch in mini_batch.micro_batches:  # a reference policy near the sampler, the same for a token anywhere
            reference = batch.behavior_logprobs + 0.05 * torch.sin(batch.labels.float())
            batch.reference_logprobs = reference if key in job["with_reference"] else None
        results["losses"][key] = actor.accumulate(mini_batch, LossConfig.model_validate(loss))
        if config.actor.distributed_optimizer:  # it keeps gradients in shards of the flat buffer
            continue
        if name == "one" or key == first:
            gradients = merged(learner, actor.gradients())
            if dist.get_rank() == 0:
                save_file(gradients, folder / f"{name}.{key}.gradients.safetensors")
        results["gradient_errors"][key] = gradient_error(learner, folder / f"one.{key}.gradients.safetensors")
    results["step"] = actor.step()
    results["spread"] = actor.replica_spread()
    weights = merged(learner, actor.weights())
    if dist.get_rank() == 0:
        save_file(weights, folder / f"{name}.weights.safetensors")
        (folder / "results" / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    actor.close(keep_process_group=True)


def main() -> None:
    for path in sys.argv[1:]:
        job = json.loads(Path(path).read_text())
        for name, overrides in job["layouts"].items():
            run_layout(job, name, overrides)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
