"""The problems of a run, and its evaluations: several named sets through the run's engine, best and last kept.

Which model is best is decided by one set of role validation, which the config names; test sets are only reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor import parallel, platform
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import load_demonstrations, load_problems, load_tokenizer, tokenize_problems
from megatron_rlvr.evaluation import HeldOutResult, evaluate_held_out
from megatron_rlvr.files import write_whole
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.observability.metrics import plain_metrics, validation_key
from megatron_rlvr.observability.reporter import Reporter
from megatron_rlvr.rewards import Scorer
from megatron_rlvr.rollout.engine import Engine
from megatron_rlvr.rollout.factory import build_engine, sampling_settings
from megatron_rlvr.types import Prompt, Trajectory

Decode = Callable[[list[int]], str]
Results = dict[str, HeldOutResult]


class ProblemSets:
    """Training and held-out prompts, each read when asked for, and the tokenizer's way back to text.

    Reading raises UserError for a faulty line or a prompt that is too long.
    """

    def __init__(self, config: RunConfig) -> None:
        self._run, self._config, self._tokenizer = config, config.data, load_tokenizer(config.model.path)

    @cached_property
    def train(self) -> list[Prompt]:
        """What a run trains on; the config checks have seen to it that `train` names a file."""
        return self._load(self._config.train)

    @cached_property
    def held_out(self) -> dict[str, list[Prompt]]:
        """The problems of every held-out set, as many as it asks for."""
        return {name: self._load(chosen.path)[: chosen.problems] for name, chosen in self._run.held_out_sets.items()}

    @cached_property
    def experts(self) -> list[Trajectory]:
        """Right responses that a replay buffer starts with."""
        replay, data = self._run.replay, self._config
        if replay.ratio == 0 or replay.experts is None:
            return []
        return load_demonstrations(
            replay.experts,
            self._tokenizer,
            prompt_key=data.prompt_key,
            response_key=replay.response_key,
            **data.prompt_options,
        )

    def _load(self, path: Path | None) -> list[Prompt]:
        if path is None:
            return []
        data = self._config
        problems = load_problems(path, data.prompt_key, data.answer_key)
        return tokenize_problems(problems, self._tokenizer, **data.prompt_options)

    def decode(self, token_ids: list[int]) -> str:
        """Sampled ids as the text that verifiers read."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class Evaluations:
    """A run's evaluations so far. The same on every rank; rank 0 keeps evaluations.json in the run directory.

    last   version of the weights and results by set; None before the first evaluation
    best   the same of the evaluation with the highest accuracy on `config.best_by`, the earlier of equal ones
    """

    def __init__(self, config: RunConfig, sets: Mapping[str, list[Prompt]], decode: Decode) -> None:
        self._config, self._sets, self._decode = config, sets, decode
        self.last: tuple[int, Results] | None = None
        self.best: tuple[int, Results] | None = None

    @property
    def best_version(self) -> int | None:
        """Version of the best weights; None where nothing decides."""
        return self.best[0] if self.best is not None else None

    def due(self, version: int) -> bool:
        """Whether there are sets, and these weights have not been evaluated on them."""
        return bool(self._sets) and (self.last is None or self.last[0] != version)

    def run(self, engine: Engine, version: int) -> dict[str, float]:
        """Evaluate the engine's weights on all sets; the metrics. A collective over all ranks."""
        results = evaluate(self._config, engine, self._sets, self._decode)
        self.record(version, results)
        return self.metrics(results)

    def record(self, version: int, results: Results) -> None:
        """Take the results of `version` as the last ones, and as the best where they are."""
        self.last = (version, results)
        name = self._config.best_by
        if name is not None and (self.best is None or results[name].accuracy > self.best[1][name].accuracy):
            self.best = self.last
        if dist.get_rank() == 0:
            write_whole(
                RunFiles(self._config.run_dir).evaluations, (json.dumps(self._page(), indent=2) + "\n").encode()
            )

    def metrics(self, results: Results) -> dict[str, float]:
        """The schema's names: accuracies by set, and the best so far of the set that decides."""
        metrics = {key: value for name, result in results.items() for key, value in _metrics(name, result).items()}
        name = self._config.best_by
        if self.best is not None and name is not None:
            metrics |= {f"val-aux/{name}/best": self.best[1][name].accuracy, f"val-aux/{name}/best_step": self.best[0]}
        return metrics

    def sentences(self) -> list[str]:
        """The last results for people, one a set."""
        return sentences(self.last[1]) if self.last is not None else []

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from here, as plain JSON values."""
        return {"last": _plain(self.last), "best": _plain(self.best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; what was found on sets that have changed since does not count."""
        self.last, self.best = (_read(state[key]) for key in ("last", "best"))
        if self.last is not None and list(self.last[1]) != list(self._sets):
            self.last = None
        if self.best is not None and self._config.best_by not in self.best[1]:
            self.best = None

    def _page(self) -> dict[str, Any]:
        roles = {name: chosen.role for name, chosen in self._config.held_out_sets.items()}
        return {"best_by": self._config.best_by, "roles": roles, **self.state_dict()}


def evaluate(config: RunConfig, engine: Engine, sets: Mapping[str, list[Prompt]], decode: Decode) -> Results:
    """Accuracy on every set with the rollout section's sampling and a seed of its own."""
    sampling = sampling_settings(config, seed=config.seed + 1_000_003 * (1 + dist.get_rank()))
    results = {}
    with Scorer(config.rewards.name, **config.rewards.verifier_options) as scorer:
        for name, chosen in config.held_out_sets.items():
            samples = chosen.samples or config.trainer.eval_samples
            results[name] = evaluate_held_out(engine, sets[name], samples, sampling, decode, scorer.score)
    return results


def evaluate_checkpoint(config: RunConfig) -> None:
    """Held-out accuracy of `model.path`: logged as step 0 of its own run directory and printed."""
    data = ProblemSets(config)
    evaluations = Evaluations(config, data.held_out, data.decode)
    parallel.join()
    engine = build_engine(config, read_model_spec(config.model.path), platform.device())
    with Reporter(config.run_dir, config, dist.get_rank() == 0, updates=1) as reporter:
        with reporter.timer("testing"):
            metrics = evaluations.run(engine, 0)
        reporter.log(0, metrics)
    if dist.get_rank() == 0:
        for sentence in evaluations.sentences():
            print(sentence)
    engine.close()
    parallel.shutdown()


def sentences(results: Results) -> list[str]:
    """Results for people; the set's name in front where there are several."""
    if len(results) == 1:
        return [str(result) for result in results.values()]
    return [f"{name}: {result}" for name, result in results.items()]


def _metrics(name: str, result: HeldOutResult) -> dict[str, float]:
    return {
        validation_key(name, result.samples): result.accuracy,
        f"val-aux/{name}/standard_error": result.standard_error,
        f"val-aux/{name}/response_length": result.mean_length,
    }


def _plain(found: tuple[int, Results] | None) -> list[Any] | None:
    """JSON values, with null for the error of a single problem, which is NaN."""
    return None if found is None else [found[0], {name: plain_metrics(asdict(r)) for name, r in found[1].items()}]


def _read(found: list[Any] | None) -> tuple[int, Results] | None:
    if found is None:
        return None
    return found[0], {name: _result(fields) for name, fields in found[1].items()}


def _result(fields: Mapping[str, Any]) -> HeldOutResult:
    filled: dict[str, Any] = {name: math.nan if value is None else value for name, value in fields.items()}
    return HeldOutResult(**filled)
