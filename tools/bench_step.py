"""Step time of Megatron's schedule with a policy loss against megatron-core's own language-model loss, on one batch.

    python tools/bench_step.py [--repeats 40] [--sequences 64] [--tokens 64] [--hidden 256] [--losses respo proximal_kl]

Both run the same model, tokens and schedule in one process, forward and backward without an optimizer step, in turns
whose order alternates; printed are the median and the quartiles over the rounds of the ratio within a round, since
single steps vary by a tenth on a shared machine: the median of 40 is then good to about 0.02. All tokens but the first
of each sequence are action tokens, as the language-model loss trains on all of them. A policy loss is timed with its
metrics, 2 to 4 ms a micro-batch whatever the model, and with the head's recomputed product.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_tiny_model import make_tiny_model, parser
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rlvr.actor.schedule import packed_params
from megatron_rlvr.config.tree import LossConfig, RunConfig
from megatron_rlvr.data import build_mini_batch
from megatron_rlvr.learner import Learner
from megatron_rlvr.types import MiniBatch, Trajectory


def build_learner(folder: Path, sequences: int, tokens: int, hidden: int) -> Learner:
    """The tiny Qwen3-MoE on one rank, with room for the whole batch in one micro-batch."""
    model = folder / "model"
    make_tiny_model(parser().parse_args([str(model), "--hidden", str(hidden)]))
    actor = {"dtype": "float32", "micro_batch_tokens": sequences * tokens}
    config = {"run_dir": str(folder), "model": {"path": str(model)}, "data": {"train": "unused"}, "actor": actor}
    return Learner(RunConfig.model_validate(config), updates=10)


def build_batch(learner: Learner, sequences: int, tokens: int) -> MiniBatch:
    """`sequences` random responses of `tokens` tokens, with log-probs near those of the untrained model."""
    rng = np.random.default_rng(0)
    mask = np.arange(tokens) > 0

    def trajectory() -> Trajectory:
        return Trajectory(
            token_ids=rng.integers(3, learner.spec.vocab_size, tokens).astype(np.int32),
            action_mask=mask,
            behavior_logprobs=np.where(mask, -5 + 0.1 * rng.standard_normal(tokens), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            finish_reason="length",
            advantage=float(rng.standard_normal()),
        )

    batch = build_mini_batch([trajectory() for _ in range(sequences)], **learner.batch_options())
    for micro_batch in batch.micro_batches:
        micro_batch.reference_logprobs = micro_batch.behavior_logprobs.clone()
    return batch


def language_model_step(learner: Learner, batch: MiniBatch) -> None:
    """The same tokens through megatron-core's labels path: vocab-parallel cross entropy, mean over tokens."""
    actor = learner.actor
    for chunk in actor.wrapped:
        chunk.zero_grad_buffer()
    actor.optimizer.zero_grad()

    def forward(iterator: Any, model: Any) -> tuple:
        micro_batch = next(iterator)
        labels = torch.zeros_like(micro_batch.token_ids)
        labels.view(-1)[micro_batch.action_index] = micro_batch.labels
        for head in actor.schedule.heads:
            head.batch = None
        losses = model(
            micro_batch.token_ids,
            micro_batch.position_ids,
            None,
            labels=labels,
            packed_seq_params=packed_params(micro_batch),
        )

        def loss(output: torch.Tensor) -> tuple:
            mean = output.float().view(-1)[micro_batch.action_index].sum() / batch.num_action_tokens
            return mean, torch.zeros((), dtype=torch.int), {"loss": mean.detach().clone()}

        return losses, loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batch.micro_batches),
        model=actor.wrapped[0],
        num_microbatches=len(batch.micro_batches),
        seq_length=batch.micro_batches[0].token_ids.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )


def paired_seconds(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each step in every round; each round runs all steps, every second one in reverse order."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in list(steps)[:: 1 if repeat % 2 else -1]:
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def ratio_quartiles(seconds: list[float], baseline: list[float]) -> list[float]:
    """Quartiles over the rounds of one step's time over the other's in the same round: slow drifts cancel."""
    return statistics.quantiles((mine / other for mine, other in zip(seconds, baseline, strict=True)), n=4)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=40)
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--tokens", type=int, default=64, help="tokens per sequence")
    options.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    options.add_argument("--losses", nargs="+", default=["respo", "proximal_kl"])
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        learner = build_learner(Path(folder), args.sequences, args.tokens, args.hidden)
        batch = build_batch(learner, args.sequences, args.tokens)
        steps: dict[str, Callable[[], Any]] = {"language model": lambda: language_model_step(learner, batch)}
        for name in args.losses:
            steps[name] = functools.partial(learner.actor.accumulate, batch, LossConfig(name=name))
        seconds = paired_seconds(steps, args.repeats)
        print(f"{args.sequences} sequences of {args.tokens} tokens, median CPU seconds of {args.repeats} rounds")
        for name, times in seconds.items():
            low, ratio, high = ratio_quartiles(times, seconds["language model"])
            print(f"{name:16s} {statistics.median(times) * 1e3:8.1f} ms   {ratio:.3f}x   {low:.3f}..{high:.3f}")
        learner.close()


if __name__ == "__main__":
    main()
