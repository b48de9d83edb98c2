"""The one object through which a run reports: metrics, rollouts, progress bar, and the report at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.observability.metrics import Schema, is_validation_accuracy, plain_metrics
from megatron_rlvr.observability.progress import Progress
from megatron_rlvr.observability.rollouts import write_rollouts
from megatron_rlvr.observability.sinks import Sink, open_sinks
from megatron_rlvr.observability.timers import PhaseTimer
from megatron_rlvr.types import Group


class Reporter:
    """Writes into `run_dir` on the one rank where `enabled`; elsewhere every method does nothing.

    updates   length of the progress bar; default: trainer.updates
    after     the update that the run goes on from; None: it starts
    strict    refuse metrics that are not in the schema (ValueError) instead of warning once

    `with reporter.timer("gen"): ...` times a phase; the next `log` adds timing_s/gen.
    A context: leaving it without an exception writes the report; leaving it with one only closes the files.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        enabled: bool,
        *,
        updates: int | None = None,
        strict: bool = False,
        after: int | None = None,
    ) -> None:
        self.timer = PhaseTimer()
        self._enabled = enabled
        self._files = RunFiles(run_dir)
        self._write_rollouts = config.logging.rollouts
        self._strict = strict
        self._schema = Schema()
        self._warned: set[str] = set()
        self._sinks: list[Sink] = []
        self._progress: Progress | None = None
        if enabled:
            self._sinks = open_sinks(config.model_copy(update={"run_dir": run_dir}), after)
            if config.logging.progress:
                self._progress = Progress(updates or config.trainer.updates, name=config.name, done=after or 0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report one step, once, with the phases timed since the last call.

        metrics   name -> number, NumPy scalar or one-element tensor

        Raises ValueError: `strict` and a name that the schema does not hold.
        """
        metrics = {**self.timer.collect(), **metrics}
        if not self._enabled:
            return
        self._check(metrics)
        numbers = plain_metrics(metrics)
        for sink in self._sinks:
            sink.write(step, numbers)
        if self._progress is not None:
            accuracies = [v for name, v in numbers.items() if is_validation_accuracy(name)]
            self._progress.show(step, numbers, accuracies[0] if accuracies else None)

    def _check(self, names: Iterable[str]) -> None:
        if self._strict:
            self._schema.check(names)
        for name in set(self._schema.unknown(names)) - self._warned:
            self._warned.add(name)
            print(f"warning: metric {name} is not in the schema of docs/metrics.md", file=sys.stderr)

    def rollouts(self, step: int, groups: Iterable[Group]) -> None:
        """Keep a rollout batch as rollouts/step_<step>.jsonl, unless logging.rollouts is off."""
        if self._enabled and self._write_rollouts:
            write_rollouts(self._files.rollouts, step, groups)

    def close(self, *, report: bool = True) -> None:
        """Close all files and, with `report`, draw the curves and write report.md. Safe to call twice."""
        if not self._enabled:
            return
        self._enabled = False
        if self._progress is not None:
            self._progress.close()
        for sink in self._sinks:
            sink.close()
        if report:
            from megatron_rlvr.observability.report import write_report

            write_report(self._files.root)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(report=kind is None)
