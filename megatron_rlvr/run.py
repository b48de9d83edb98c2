"""One run, composed of the rooms: what `trainer.py` calls the stages of the loop on."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller import Controller
from megatron_rlvr.controller.statistics import batch_metrics
from megatron_rlvr.held_out import Evaluations, ProblemSets
from megatron_rlvr.learner import Learner
from megatron_rlvr.losses import alarms, step_zero_alarms, uses_reference
from megatron_rlvr.observability.profiler import Profiler
from megatron_rlvr.observability.reporter import Reporter
from megatron_rlvr.observability.resources import memory_metrics
from megatron_rlvr.refresh import Refresher
from megatron_rlvr.rollout.factory import build_engine
from megatron_rlvr.run_checkpoints import RunCheckpoints, find_start
from megatron_rlvr.types import Group, MiniBatch


class Run:
    """Learner, engine, controller and reporter of one training run on this rank. A context that closes them all."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.files = config, RunFiles(config.run_dir)
        data = ProblemSets(config)
        # before anything heavy: a bad line must not cost a start-up
        prompts, experts, held_out = data.train, data.experts, data.held_out
        self.learner = Learner(config, updates=config.trainer.updates)
        self.actor = self.learner.actor
        start = find_start(config)
        self.reporter = Reporter(config.run_dir, config, dist.get_rank() == 0, after=start.step)
        self.engine = build_engine(config, self.learner.spec, self.actor.device)
        self.decode = data.decode
        self.controller = Controller(
            config,
            prompts,
            self.engine,
            data.decode,
            self.learner.batch_options(),
            self.reporter.timer,
            experts,
        )
        self.refresher = Refresher(self.actor, self.engine, self.learner.weight_map, config.refresh_interval)
        self._step_started = time.perf_counter()
        self._sampled_before = 0  # tokens that the engines had sampled when the last update was reported
        self._alarmed: set[str] = set()
        self._gaps: list[dict[str, float]] = []  # of the mini-batches that are still to come
        self.uses_reference = uses_reference(config.loss.name, config.reference.enabled)
        self.evaluations = Evaluations(config, held_out, data.decode)
        self.checkpoints = RunCheckpoints(config, self.actor, self.controller, self.refresher)
        self.resumed = start.checkpoint is not None
        if start.checkpoint is not None:
            self._restore(start.checkpoint)
        self.profiler = Profiler(config.profile, self.files.profile, dist.get_rank())
        self.profiler.advance(self.version)

    def _restore(self, checkpoint: Path) -> None:
        """Put everything where the checkpoint found it."""
        results = self.checkpoints.restore(checkpoint)
        self._sampled_before = self.controller.generated_tokens
        self.evaluations.load_state_dict(results["evaluations"])

    @property
    def version(self) -> int:
        """Optimizer updates done: the version of the learner's weights."""
        return self.actor.version

    def check_staleness(self, part: list[Group]) -> None:
        """The bound that admission kept, once more where it matters: just before the update."""
        oldest = min(int(t.versions[t.action_mask].min()) for group in part for t in group.trajectories)
        if self.version - oldest > self.config.max_staleness:
            raise RuntimeError(
                f"a token of version {oldest} reached the update of version {self.version}, past max_staleness "
                f"{self.config.max_staleness}: the controller admitted what it must not"
            )

    def mini_batches(self, groups: list[Group]) -> list[tuple[list[Group], MiniBatch]]:
        """The batch cut for this rank, with what stays fixed while it is trained on: old log-probs, the reference."""
        batches = list(self.controller.mini_batches(groups))
        if self.uses_reference and self.config.reference.refresh_interval is None:
            self.actor.refresh_reference()
        if self.config.loss.old_logprobs == "recompute":
            with self.reporter.timer("old_log_prob"):
                self._gaps = [self.actor.rescore_behavior(batch, replace=True) for _, batch in batches]
        return batches

    def _score_reference(self, mini_batch: MiniBatch) -> dict[str, float]:
        """Fill the mini-batch's reference log-probs, from a new copy of the learner where one is due."""
        interval = self.config.reference.refresh_interval
        if interval is not None and self.version % interval == 0:
            self.actor.refresh_reference()
        with self.reporter.timer("ref"):
            self.actor.score_reference(mini_batch)
        version = self.actor.reference_version
        return {"reference/version": version, "reference/age": self.version - version}

    def update(self, part: list[Group], mini_batch: MiniBatch) -> dict[str, float]:
        """One optimizer update on `mini_batch`, which holds `part`; its metrics."""
        metrics = batch_metrics(part, self.version) | self.controller.metrics()
        if self._gaps:
            metrics |= self._gaps.pop(0)
        if self.uses_reference:
            metrics |= self._score_reference(mini_batch)
        with self.reporter.timer("update_actor"):
            metrics |= self.actor.update(mini_batch, self.config.loss)
        metrics |= {
            "actor/micro_batches": len(mini_batch.micro_batches),
            "actor/action_tokens": mini_batch.num_action_tokens,
        }
        if metrics["staleness/max"] == 0:
            metrics |= _refresh_gap(metrics)
            self._check_step_zero(metrics)
        return metrics

    def _check_step_zero(self, metrics: dict[str, float]) -> None:
        """The step-0 law: the weights that sampled are the weights that score, so every ratio is 1."""
        tolerance = self.config.step_zero_tolerance
        broken = step_zero_alarms(metrics, tolerance) if tolerance is not None else []
        if broken:
            raise RuntimeError(" ".join(broken))

    def report(self, metrics: dict[str, float]) -> None:
        """Log one update with its phases, speed and memory, and say once what the alarms say."""
        progress = {
            "training/global_step": self.version,
            "rollout/total_tokens": self.controller.generated_tokens,
        }
        self.reporter.log(self.version, metrics | progress | self._speed(metrics) | memory_metrics())
        self._alarm(metrics)
        self.profiler.advance(self.version)

    def _speed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Wall time since the last report, and tokens per second of the phases; generation only where there was one."""
        now = time.perf_counter()
        step, self._step_started = now - self._step_started, now
        sampled = self.controller.generated_tokens - self._sampled_before
        self._sampled_before = self.controller.generated_tokens
        generation, update = self.reporter.timer.seconds("gen"), self.reporter.timer.seconds("update_actor")
        return {
            "timing_s/step": step,
            "perf/time_per_step": step,
            "perf/throughput": metrics["perf/total_num_tokens"] / step,
            "perf/update_throughput": metrics["actor/action_tokens"] / update,
            **({"rollout/throughput": sampled / generation} if generation > 0 else {}),
        }

    def _alarm(self, metrics: dict[str, float]) -> None:
        for sentence in alarms(metrics):
            kind = re.sub(r"[\d.,%]+", "", sentence)
            if dist.get_rank() == 0 and kind not in self._alarmed:
                self._alarmed.add(kind)
                print(f"\nalarm at update {self.version}: {sentence}", file=sys.stderr)

    def record(self, groups: list[Group]) -> None:
        """Keep the rollout batch as JSON lines."""
        self.reporter.rollouts(self.version, groups)

    def evaluate(self) -> None:
        """Accuracy on the held-out sets, sampled through the engine with the learner's present weights."""
        if not self.evaluations.due(self.version):
            return
        if self.refresher.lag:
            self.refresher.push()
        with self.reporter.timer("testing"):
            metrics = self.evaluations.run(self.engine, self.version)
        self.reporter.log(self.version, metrics)
        if self.config.trainer.save_best and self.evaluations.best_version == self.version:
            with self.reporter.timer("save_checkpoint"):
                self.learner.save(self.files.best)

    def evaluate_if_due(self) -> None:
        interval = self.config.trainer.eval_interval
        if interval and self.version % interval == 0:
            self.evaluate()

    def save_if_due(self) -> None:
        interval = self.config.trainer.save_interval
        if interval and self.version % interval == 0:
            with self.reporter.timer("save_checkpoint"):
                directory = self.files.checkpoints / f"update_{self.version:06d}"
                self.learner.save(directory)
                self.controller.save(directory)

    def _results(self) -> dict[str, Any]:
        """What a checkpoint keeps of the evaluations."""
        return {"evaluations": self.evaluations.state_dict()}

    def checkpoint_if_due(self) -> None:
        """Between two rollout batches: a training checkpoint where the config asks for one."""
        if self.config.checkpoint.interval is not None:
            with self.reporter.timer("save_checkpoint"):
                self.checkpoints.save_if_due(self._results())

    def stop(self) -> None:
        """Leave before the end, with a checkpoint to go on from."""
        self.checkpoints.save(self._results())
        self.checkpoints.settle()
        if dist.get_rank() == 0:
            print(
                f"\n{self.config.name}: stopped after update {self.version} as SIGUSR1 asked; start it again with "
                "--resume to go on",
                file=sys.stderr,
            )

    def finish(self) -> None:
        """Last evaluation, and the trained model as a Hugging Face directory."""
        self.evaluate()
        if self.config.checkpoint.at_end:
            self.checkpoints.save(self._results())
        self.checkpoints.settle()
        self.learner.save(self.files.model)
        if dist.get_rank() == 0:
            for sentence in self.evaluations.sentences():
                print(f"\n{self.config.name}: {sentence}; model in {self.files.model}")

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.profiler.close(error)
        self.reporter.__exit__(kind, error, trace)
        if kind is None:  # after a failure the peers may be stuck in a collective: the launcher ends them
            self.engine.close()
            self.learner.close()


def _refresh_gap(metrics: dict[str, float]) -> dict[str, float]:
    """How far trainer and engine are apart right after a refresh: measured when the trainer rescored the tokens, else
    what the update found, whose behaviour log-probs are the engine's."""
    if "rollout/logprob_gap" in metrics:
        mean, largest = metrics["rollout/logprob_gap"], metrics["rollout/logprob_gap/max"]
    else:
        mean, largest = metrics.get("actor/log_ratio_abs/mean", 0.0), metrics.get("actor/log_ratio_abs/max", 0.0)
    return {"refresh/logprob_gap/mean": mean, "refresh/logprob_gap/max": largest}
