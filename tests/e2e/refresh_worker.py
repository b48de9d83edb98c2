"""One rank: train, push, and compare the engine's log-probs with the trainer's, three times; then write the model.

python -m tests.e2e.refresh_worker JOB.json  (JOB: config, batch, output)
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner
from megatron_rlvr.refresh import Refresher
from megatron_rlvr.rollout.factory import build_engine
from megatron_rlvr.types import Trajectory


def trainer_scores(learner: Learner, trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Log-probs of the action tokens by sequence length, on the one data-parallel rank."""
    mini_batch = build_mini_batch(trajectories, **learner.batch_options())
    scores = []
    results = learner.actor.logprobs(mini_batch)
    for batch, (logprobs, _) in zip(mini_batch.micro_batches, results, strict=True):
        bounds = batch.action_cu_seqlens.tolist()
        scores += [(batch.labels[a:b].tolist(), logprobs[a:b].numpy()) for a, b in itertools.pairwise(bounds)]
    return scores


def worst_gap(learner: Learner, engine, trajectories: list[Trajectory]) -> float:
    """Largest |engine - trainer| over action tokens; responses are matched by their tokens."""
    engine_scores = engine.score([t.token_ids.tolist() for t in trajectories])
    expected = {
        tuple(t.token_ids[t.action_mask].tolist()): s[t.action_mask[1:]]
        for t, s in zip(trajectories, engine_scores, strict=True)
    }
    found = trainer_scores(learner, trajectories)
    assert len(found) == len(expected)
    return max(float(np.abs(values - expected[tuple(labels)]).max()) for labels, values in found)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    config = RunConfig.model_validate(job["config"])
    with open(job["batch"], "rb") as file:  # written by the test itself
        trajectories = pickle.load(file)
    learner = Learner(config, updates=10)
    engine = build_engine(config, learner.spec, learner.actor.device)
    refresher = Refresher(learner.actor, engine, learner.weight_map, interval=1)
    gaps = {"start": worst_gap(learner, engine, trajectories)}
    certificates = []
    for update in range(1, 4):
        learner.actor.update(build_mini_batch(trajectories, **learner.batch_options()), config.loss)
        gaps[f"stale {update}"] = worst_gap(learner, engine, trajectories)
        certificates.append(refresher.push_if_due())
        gaps[f"fresh {update}"] = worst_gap(learner, engine, trajectories)
    learner.save(Path(job["output"]) / "saved")
    if dist.get_rank() == 0:
        result = {"gaps": gaps, "certificates": certificates, "version": engine.version}
        (Path(job["output"]) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    engine.close()
    learner.close()


if __name__ == "__main__":
    main()
