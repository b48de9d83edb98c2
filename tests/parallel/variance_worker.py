"""One rank: for every layout, the metrics of one mini-batch whose groups lie in several micro-batches and ranks.

python -m tests.parallel.variance_worker JOB.json  (JOB: config, batch, output, groups, layouts)
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner


def measure(job: dict, overrides: dict) -> dict[str, float]:
    base = job["config"]
    config = RunConfig.model_validate({**base, "actor": {**base["actor"], **overrides}})
    learner = Learner(config, updates=1)
    with open(job["batch"], "rb") as file:  # written by the test itself
        trajectories = pickle.load(file)
    mini_batch = build_mini_batch(trajectories, **learner.batch_options(), group_index=job["groups"])
    for batch in mini_batch.micro_batches:
        batch.reference_logprobs = batch.behavior_logprobs + 0.05 * torch.sin(batch.labels.float())
    metrics = learner.actor.accumulate(mini_batch, config.loss)
    learner.actor.close(keep_process_group=True)
    return metrics | {"micro_batches": len(mini_batch.micro_batches)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = {name: measure(job, overrides) for name, overrides in job["layouts"].items()}
    Path(f"{job['output']}/rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
