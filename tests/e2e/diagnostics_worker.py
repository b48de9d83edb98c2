"""One process, one rank: short runs of a tiny model, some of them step by step; writes what they said.

python -m tests.e2e.diagnostics_worker JOB.json  (JOB: config, folder, runs: name -> overrides, by_hand: likewise)
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.run import Run
from megatron_rlvr.sft import sft
from megatron_rlvr.trainer import train
from megatron_rlvr.types import MiniBatch


def merge(base: dict, overrides: dict) -> dict:
    result = dict(base)
    for key, value in overrides.items():
        result[key] = merge(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def weights(run: Run) -> list[torch.Tensor]:
    return [shard.clone() for _, shards in run.actor.weights("float32") for shard in shards]


def unchanged(run: Run, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(run), before, strict=True))


def logprobs(run: Run, mini_batch: MiniBatch) -> list[float]:
    return torch.cat([found for found, _ in run.actor.logprobs(mini_batch)]).tolist()


def decoupled(config: RunConfig) -> dict[str, Any]:
    """Four updates on one engine version, where pi_behav, pi_k and pi_theta are three different policies at the last.

    The log-probs of pi_k come from the learner at the version that the reference is then a copy of.
    """
    with Run(config) as run:
        for part, mini_batch in run.mini_batches(run.controller.collect()):
            run.update(part, mini_batch)
        first, second = run.mini_batches(run.controller.collect())
        of_reference = logprobs(run, second[1])
        run.update(*first)
        before = weights(run)
        run.actor.score_reference(second[1])
        (batch,) = second[1].micro_batches
        result = {
            "weights_unchanged": unchanged(run, before),
            "scored": batch.reference_logprobs.tolist(),
            "reference": of_reference,
            "learner": logprobs(run, second[1]),
            "behavior": batch.behavior_logprobs.tolist(),
            "advantages": batch.advantages.tolist(),
            "cu_seqlens": batch.action_cu_seqlens.tolist(),
            "fed": [t.num_tokens - 1 for group in second[0] for t in group.trajectories],
        }
        return result | {"metrics": run.update(*second)}


def not_a_number(config: RunConfig) -> dict[str, Any]:
    """A NaN planted in one response, then the refusal, its message and what it left of the learner."""
    with Run(config) as run:
        groups = run.controller.collect()
        planted = groups[1].trajectories[2]
        planted.behavior_logprobs[-1] = torch.nan
        before = weights(run)
        try:
            run.update(*run.mini_batches(groups)[0])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        return {"message": message, "weights_unchanged": unchanged(run, before), "version": run.version}


def moved_learner(config: RunConfig) -> str:
    """What a run says when learner and engine differ from the start though both claim the same version."""
    with Run(config) as run, contextlib.redirect_stderr(io.StringIO()) as said:
        for parameter in run.actor._parameters.values():
            parameter.data += torch.randn_like(parameter)
        try:
            run.report(run.update(*run.mini_batches(run.controller.collect())[0]))
        except RuntimeError as error:
            return f"RuntimeError: {error}"
    return said.getvalue()


BY_HAND = {"decoupled": decoupled, "not_a_number": not_a_number, "stops": moved_learner, "warns": moved_learner}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])

    def config(name: str, overrides: dict) -> RunConfig:
        return RunConfig.model_validate(merge(job["config"], {**overrides, "run_dir": str(folder / name)}))

    sft(config("sft", {"model": {"path": str(folder / "init")}}))
    said = {}
    for name, overrides in job["runs"].items():
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            train(config(name, overrides))
        said[name] = stream.getvalue()
    by_hand = {name: BY_HAND[name](config(name, overrides)) for name, overrides in job["by_hand"].items()}
    (folder / "result.json").write_text(json.dumps({"stderr": said, **by_hand}))


if __name__ == "__main__":
    with mock.patch("megatron_rlvr.observability.report.write_report"):  # plots take a third of the time, and no part
        main()
