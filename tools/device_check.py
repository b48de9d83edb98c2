"""Does the loop run right on this GPU? Four checks with numbers, then a table; exit code 0 only if all pass.

    tools/device_check.sh [--cpu] [--wheels DIR] [--python PYTHON]      sets paths up and runs this program
    tools/device_check.sh --cpu --write-golden                          writes the golden values again, on a CPU

The golden values are one float32 update of the tiny Qwen3-MoE on a CPU: loss, gradient norm, the gradient norm of every
Hugging Face tensor, and the mean log-prob after the update.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).with_name("device_check_golden.json")
GOLDEN_UPDATE_LR = 1e-3
# relative; float32 sums in another order differ by some 1e-6, TF32 products by 1e-3
FLOAT32_TOLERANCE = 1e-4
AFTER_UPDATE_TOLERANCE = 1e-3  # Adam divides every gradient by its own size, the rounding of small ones included
BF16_TOLERANCE = 0.05
LOGPROB_TOLERANCE = 1e-4  # nats, engine against learner, both float32
# Of two experts whose router logits tie in float32, engine and learner may choose different ones: the rare responses
# that this hits differ by far more.
TIED_SHARE = 0.01
LEARNED = 0.08  # least rise of the mean training accuracy from the first to the last fifth of the updates


@dataclass(frozen=True)
class Settings:
    """Where and how much: sizes are updates, or prompts of the timed rollout."""

    work: Path
    cpu: bool
    updates: int
    sft_updates: int
    rollout_prompts: int


@dataclass
class Outcome:
    """What one check found: complaints (none: passed), the numbers it looked at, and figures for the table."""

    complaints: list[str] = field(default_factory=list)
    numbers: str = ""
    tokens_per_second: float | None = None

    def require(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.complaints.append(complaint)


def measure_update(settings: Settings, dtype: str) -> dict[str, Any]:
    """One update of the untrained model on the fixed batch: loss, norms, and the mean log-prob before and after."""
    from device_case import mini_batch, run_config

    from megatron_rlvr.config.tree import LossConfig
    from megatron_rlvr.learner import Learner

    config = run_config(settings.work, f"update-{dtype}", updates=1, sft_updates=1)
    optimizer = config.optimizer.model_copy(update={"lr": GOLDEN_UPDATE_LR})
    actor = config.actor.model_copy(update={"dtype": dtype, "micro_batch_tokens": 96})
    learner = Learner(config.model_copy(update={"actor": actor, "optimizer": optimizer}), updates=1)
    batch = mini_batch(actor.micro_batch_tokens)
    try:
        before = _mean_logprob(learner, batch)
        metrics = learner.actor.accumulate(batch, LossConfig(name="respo"))
        gradients = {
            hf_name: tensor.double().norm().item()
            for name, shards in learner.actor.gradients()
            for hf_name, tensor in learner.weight_map.merge(name, shards)
        }
        step = learner.actor.step()
        after = _mean_logprob(learner, batch)
    finally:
        learner.close()
    return {
        "action_tokens": batch.num_action_tokens,
        "loss": metrics["actor/pg_loss"],
        "entropy": metrics["actor/entropy"],
        "grad_norm": step["actor/grad_norm"],
        "logprob_before": before,
        "logprob_after": after,
        "gradient_norms": gradients,
    }


def _mean_logprob(learner: Any, batch: Any) -> float:
    return torch.cat([logprobs.double() for logprobs, _ in learner.actor.logprobs(batch)]).mean().item()


def check_golden(settings: Settings) -> Outcome:
    """(a) One float32 update equals the CPU's."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    measured = measure_update(settings, "float32")
    outcome = Outcome()
    gaps = {name: _gap(measured[name], golden[name]) for name in golden if isinstance(golden[name], float)}
    norms, expected = measured["gradient_norms"], golden["gradient_norms"]
    outcome.require(norms.keys() == expected.keys(), "the gradients are not those of the golden file")
    by_tensor = {name: _gap(norms[name], expected[name]) for name in norms.keys() & expected.keys()}
    worst = max(by_tensor, key=lambda name: by_tensor[name])
    for name, gap in {**gaps, worst: by_tensor[worst]}.items():
        allowed = AFTER_UPDATE_TOLERANCE if name == "logprob_after" else FLOAT32_TOLERANCE
        outcome.require(gap <= allowed, f"{name} is off by {gap:.1e} relative (allowed {allowed:.0e})")
    shown = ", ".join(f"{name} {measured[name]:.6f} (off {gap:.0e})" for name, gap in gaps.items())
    outcome.numbers = f"{shown}; worst of {len(by_tensor)} gradients {worst} off {by_tensor[worst]:.0e}"
    return outcome


def _gap(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def check_bf16(settings: Settings) -> Outcome:
    """(b) One bf16 update is finite and near the float32 golden values."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    measured = measure_update(settings, "bf16")
    outcome = Outcome()
    for name in ("loss", "grad_norm", "entropy", "logprob_after"):
        gap = _gap(measured[name], golden[name])
        outcome.require(gap <= BF16_TOLERANCE, f"{name} is off by {gap:.1%} (allowed {BF16_TOLERANCE:.0%})")
        outcome.numbers += f"{name} {measured[name]:.4f} (float32 {golden[name]:.4f}), "
    finite = all(torch.isfinite(torch.tensor(list(measured["gradient_norms"].values()))))
    outcome.require(finite, "a gradient is not finite")
    outcome.numbers += "gradients finite" if finite else "gradients not finite"
    return outcome


def check_rollout(settings: Settings) -> Outcome:
    """(c) The transformers engine samples, its log-probs are the learner's, before and after a pushed update."""
    from device_case import GROUP_SIZE, mini_batch, run_config

    from megatron_rlvr.config.tree import LossConfig
    from megatron_rlvr.held_out import ProblemSets
    from megatron_rlvr.learner import Learner
    from megatron_rlvr.refresh import Refresher
    from megatron_rlvr.rollout import build_engine, roll_out, sampling_settings

    config = run_config(settings.work, "rollout", updates=1, sft_updates=1)
    data = ProblemSets(config)
    prompts = (data.train * settings.rollout_prompts)[: settings.rollout_prompts]
    learner = Learner(config, updates=1)
    engine = build_engine(config, learner.spec, learner.actor.device)
    outcome, gaps, shares = Outcome(), [], []
    try:
        refresher = Refresher(learner.actor, engine, learner.weight_map, interval=1)
        for seed in (1, 2):
            started = time.perf_counter()
            groups = roll_out(engine, prompts, GROUP_SIZE, sampling_settings(config, seed), data.decode)
            seconds = time.perf_counter() - started
            gap = _engine_gaps(learner, groups)
            gaps.append(gap.quantile(1 - TIED_SHARE).item())
            shares.append((gap > LOGPROB_TOLERANCE).double().mean().item())
            tokens = sum(t.response_length for group in groups for t in group.trajectories)
            outcome.tokens_per_second = tokens / seconds
            if seed == 1:
                learner.actor.update(mini_batch(), LossConfig(name="respo"))
                refresher.push()
    finally:
        engine.close()
        learner.close()
    for when, share in zip(("as loaded", "after a refresh"), shares, strict=True):
        outcome.require(share <= TIED_SHARE, f"engine and learner differ on {share:.1%} of the tokens {when}")
    outcome.numbers = (
        f"{tokens} tokens; engine against learner within {gaps[0]:.0e} nats, after a refresh within {gaps[1]:.0e}, on "
        f"{1 - TIED_SHARE:.0%} of the tokens; beyond {LOGPROB_TOLERANCE:.0e}: {shares[0]:.2%} and {shares[1]:.2%}"
    )
    return outcome


def _engine_gaps(learner: Any, groups: Sequence[Any]) -> torch.Tensor:
    """[tokens] absolute differences in nats between the log-probs that came with the samples and the learner's own."""
    from megatron_rlvr.data import build_mini_batch

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        trajectory.advantage = 0.0
    batch = build_mini_batch(trajectories, **learner.batch_options())
    pairs = zip(learner.actor.logprobs(batch), batch.micro_batches, strict=True)
    return torch.cat([(mine - part.behavior_logprobs).abs() for (mine, _), part in pairs])


def check_learning(settings: Settings) -> Outcome:
    """(d) A short supervised warm-up, then the real trainer: the accuracy on sampled responses rises."""
    from device_case import run_config

    from megatron_rlvr.sft import sft
    from megatron_rlvr.trainer import train

    sft(run_config(settings.work, "sft", updates=1, sft_updates=settings.sft_updates))
    config = run_config(settings.work, "train", updates=settings.updates, sft_updates=1, model=settings.work / "warm")
    train(config)
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "training/accuracy" in row]
    accuracy = [row["training/accuracy"] for row in rows]
    window = max(1, len(rows) // 5)
    first, last = sum(accuracy[:window]) / window, sum(accuracy[-window:]) / window
    outcome = Outcome()
    outcome.require(len(rows) == settings.updates, f"{len(rows)} of {settings.updates} updates were reported")
    outcome.require(last - first >= LEARNED, f"accuracy rose by {last - first:.3f} only (at least {LEARNED})")
    gap = sorted(row["actor/log_ratio_abs/max"] for row in rows)[len(rows) // 2]
    outcome.require(gap <= LOGPROB_TOLERANCE, f"engine and learner differ by {gap:.1e} nats in the median update")
    outcome.tokens_per_second = _mean(rows, "perf/total_num_tokens") / _mean(rows, "timing_s/step")
    phases = ", ".join(f"{name} {_mean(rows, f'timing_s/{name}'):.3f}" for name in ("gen", "update_actor", "refresh"))
    outcome.numbers = (
        f"accuracy {first:.3f} -> {last:.3f} over {len(rows)} updates; engine against learner within {gap:.0e} nats in "
        f"the median update; seconds an update: {phases}"
    )
    return outcome


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    """Over the updates after the first, which pays for what is built once."""
    return sum(row[name] for row in rows[1:]) / len(rows[1:])


CHECKS: tuple[tuple[str, Callable[[Settings], Outcome]], ...] = (
    ("float32 update", check_golden),
    ("bf16 update", check_bf16),
    ("rollout", check_rollout),
    ("learning", check_learning),
)


def run_checks(settings: Settings) -> bool:
    """Run all checks whatever the earlier ones say, print a line for each and the table; True if all passed."""
    from megatron_rlvr.actor import parallel

    rows, passed = [], True
    for name, check in CHECKS:
        _reset_peak()
        started = time.perf_counter()
        try:
            outcome = check(settings)
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome([f"{type(error).__name__}: {error}"])
            parallel.shutdown()
        seconds = time.perf_counter() - started
        verdict = "FAIL" if outcome.complaints else "PASS"
        passed = passed and not outcome.complaints
        print(f"{verdict} {name}: {'; '.join([*outcome.complaints, outcome.numbers])}", flush=True)
        rate = "-" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}"
        rows.append((name, verdict, f"{seconds:.1f}", rate, f"{_peak_gib():.2f}"))
    _print_table(("check", "verdict", "seconds", "tokens/s", "peak GiB"), rows)
    return passed


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_gib() -> float:
    """Memory that tensors took on the GPU since the last reset; on a CPU the process's peak so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def describe_machine() -> str:
    import transformers
    from megatron.core import __version__ as megatron_version

    versions = f"torch {torch.__version__}, megatron-core {megatron_version}, transformers {transformers.__version__}"
    if not torch.cuda.is_available():
        return f"CPU; {versions}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}; {versions}"


def _forbid_tf32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def write_golden(settings: Settings) -> None:
    """Measure the golden values here, on a CPU, and write them beside this program."""
    measured = measure_update(settings, "float32")
    GOLDEN.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check one update, a bf16 update, rollout and learning on this GPU.")
    parser.add_argument("--work", type=Path, required=True, help="scratch directory, which must not exist yet")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with fewer updates")
    parser.add_argument("--write-golden", action="store_true", help="write the golden values and stop; needs --cpu")
    options = parser.parse_args()
    if options.cpu == torch.cuda.is_available():
        state = "is a GPU; hide it with CUDA_VISIBLE_DEVICES= " if options.cpu else "is no GPU that torch can use; run"
        parser.error(f"here {state}{'for' if options.cpu else 'with'} --cpu")
    if options.write_golden and not options.cpu:
        parser.error("--write-golden needs --cpu")
    warnings.filterwarnings("ignore")
    _forbid_tf32()
    from device_case import write_model, write_task

    from megatron_rlvr.actor import parallel  # noqa: F401 - prepares torch before megatron is imported

    started = time.perf_counter()
    write_model(options.work / "model")
    write_task(options.work / "task")
    small = options.cpu
    settings = Settings(options.work, small, 30 if small else 50, 60 if small else 150, 16 if small else 256)
    if options.write_golden:
        write_golden(settings)
        return 0
    print(describe_machine(), flush=True)
    passed = run_checks(settings)
    print(f"{'all checks passed' if passed else 'some checks FAILED'} in {time.perf_counter() - started:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
