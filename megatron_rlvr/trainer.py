"""The loop. Every rank runs it; the rooms do the work."""

from __future__ import annotations

from megatron_rlvr.checkpoint.stop import StopRequest
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.held_out import evaluate_checkpoint
from megatron_rlvr.run import Run


def train(config: RunConfig, stop: StopRequest | None = None) -> bool:
    """Train as `config` says; the caller has checked it and made the run directory.

    stop   asks the run to leave with a checkpoint at the end of a rollout batch
    Returns False where it left because of that.
    """
    stop = stop or StopRequest()
    with Run(config) as run:
        if not run.resumed:
            run.evaluate()
        while run.version < config.trainer.updates:
            if stop.agreed():
                run.stop()
                return False
            groups = run.controller.collect()  # 1 propose, 2 roll out, 3 reward, 4 advantage
            for part, mini_batch in run.mini_batches(groups):  # 5 batch
                run.check_staleness(part)
                metrics = run.update(part, mini_batch)  # 6 update
                metrics |= run.refresher.push_if_due()  # 7 refresh
                run.report(metrics)  # 8 report
                run.evaluate_if_due()
                run.save_if_due()
                if run.version == config.trainer.updates:
                    break
            run.record(groups)
            run.checkpoint_if_due()
        run.finish()
    return True


def evaluate(config: RunConfig) -> None:
    """Sample and score the held-out problems with the model of `config`; no learner is built."""
    evaluate_checkpoint(config)
