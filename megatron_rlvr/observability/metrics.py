"""The one schema: every metric that a run may log, with unit and meaning. Names are verl's where verl has one.

`python -m megatron_rlvr.observability.metrics` prints the table of docs/metrics.md.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One name; with `endings`, the names `name/ending`; a name that ends in / is a family of open-ended names."""

    name: str
    unit: str
    meaning: str
    endings: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All full names, or the one prefix of a family."""
        return tuple(f"{self.name}/{ending}" for ending in self.endings) or (self.name,)

    @property
    def is_family(self) -> bool:
        return self.name.endswith("/")


_MEAN_MAX_MIN = ("mean", "max", "min")
_MOMENTS = ("mean", "std", "max", "min")

SCHEMA: tuple[Metric, ...] = (
    Metric("training/global_step", "updates", "optimizer updates done"),
    Metric("training/accuracy", "share", "responses that the verifier accepts: (score + 1) / 2"),
    Metric("training/epoch", "epochs", "whole passes over the training problems that have been sampled"),
    # the update
    Metric("actor/pg_loss", "nats", "policy loss of the update: sum over action tokens by the global denominator"),
    Metric("actor/loss", "nats", "mean negative log-likelihood per response token (sft)"),
    Metric("actor/entropy", "nats", "mean entropy of the policy at the action tokens"),
    Metric("actor/grad_norm", "1", "global gradient norm before clipping"),
    Metric("actor/lr", "1", "learning rate of the update"),
    Metric("actor/skipped_updates", "updates", "1 where the gradient was not finite and the update was left out"),
    Metric("actor/ppo_kl", "nats", "mean of behaviour minus learner log-prob over action tokens"),
    Metric("actor/pg_clipfrac", "share", "action tokens whose weight the loss's clip or clamp cut or switched off"),
    Metric("actor/ratio", "1", "mean of learner over behaviour probability per action token"),
    Metric("actor/ratio", "1", "its extremes", ("max", "min")),
    Metric("actor/log_ratio_abs", "nats", "largest |learner - behaviour log-prob| of a token", ("max",)),
    Metric("actor/log_ratio_abs", "nats", "its mean over tokens", ("mean",)),
    Metric("actor/impossible_tokens", "share", "action tokens with log-prob -inf on either side"),
    Metric("actor/advantage_abs", "1", "mean |advantage| per response"),
    Metric("actor/micro_batches", "count", "micro-batches of the update on one data-parallel rank"),
    Metric("actor/action_tokens", "tokens", "action tokens of the update over all ranks: the denominator"),
    Metric("actor/padding", "share", "positions of the micro-batches, over all ranks, that hold no token"),
    # importance weights and tails
    Metric("kl/behavior", "nats", "estimates of KL(behaviour, learner) per token", ("k1", "k3")),
    Metric("kl/reference", "nats", "estimates of KL(learner, reference) per token", ("k1", "k3")),
    Metric("log_w/positive", "nats", "log W before the clamp, responses with advantage > 0", _MOMENTS),
    Metric("log_w/negative", "nats", "log W before the clamp, responses with advantage < 0", _MOMENTS),
    Metric("ess/raw", "count", "effective sample size of the raw importance weights"),
    Metric("ess/raw", "share", "the same as a share of the batch", ("share",)),
    Metric("ess/kernel", "count", "effective sample size after the loss's kernel"),
    Metric("ess/kernel", "share", "the same as a share of the batch", ("share",)),
    Metric("kernel_weight", "1", "mean kernel weight by the advantage's sign", ("positive", "negative")),
    Metric("weight_by_length/", "1", "mean kernel weight per bin of response length"),
    Metric(
        "tail/positive/",
        "share, tokens, 1",
        "per bin of log W: p, m, amplification m/p, mean_length (A > 0); n: responses in all bins",
    ),
    Metric(
        "tail/negative/",
        "share, tokens, 1",
        "per bin of log W: p, m, amplification m/p, mean_length (A < 0); n: responses in all bins",
    ),
    Metric("proximal_kl/credit_abs", "1", "mean |KL credit| per token"),
    Metric("proximal_kl/credit_abs", "1", "largest |KL credit|", ("max",)),
    Metric(
        "proximal_kl/credit_bound",
        "1",
        "mean over responses of beta * eps_F * min(H, T), plus half the tail beyond H with tail_decay",
    ),
    Metric("proximal_kl/saturated", "share", "tokens whose KL cost is clipped"),
    Metric("proximal_kl/variance/", "1", "V(H) under H=<horizon>: variance of C_1 within a group, mean over groups"),
    # rewards and lengths
    Metric("critic/score", "1", "verifier's score per response, before shaping", _MEAN_MAX_MIN),
    Metric("critic/rewards", "1", "reward per response: score plus shaping", _MEAN_MAX_MIN),
    Metric("critic/advantages", "1", "advantage per response", _MEAN_MAX_MIN),
    Metric(
        "verifier",
        "count",
        "what became of the responses of the rollout batch, dropped groups included (docs/rewards.md)",
        ("correct", "wrong", "unparsable", "timeout", "killed", "crashed"),
    ),
    Metric("reward_parts/", "1", "mean over responses of one named part of the reward"),
    Metric("response_length", "tokens", "sampled tokens per response", _MEAN_MAX_MIN),
    Metric("response_length/clip_ratio", "share", "responses cut at the cap"),
    Metric("response/length", "tokens", "action tokens per trained response", _MOMENTS),
    Metric("prompt_length", "tokens", "tokens per prompt", _MEAN_MAX_MIN),
    # rollouts and refreshes
    Metric("staleness", "updates", "learner version minus the version that sampled a token", ("mean", "max")),
    Metric("rollout/weight_version", "version", "weight version of the engine"),
    Metric("rollout/mixed_versions", "share", "responses sampled by more than one weight version"),
    Metric("rollout/groups", "count", "groups in the batch"),
    Metric("rollout/informative_groups", "share", "groups whose verifier scores are not all equal"),
    Metric("rollout/dropped_groups", "count", "groups that dynamic sampling dropped"),
    Metric("rollout/attempts", "count", "rollout rounds that filled the batch"),
    Metric("rollout/throughput", "tokens/s", "sampled tokens per second of generation over all engines"),
    Metric("rollout/total_tokens", "tokens", "sampled tokens since the start of the run"),
    Metric("rollout/entropy", "nats", "mean of minus the behaviour log-prob over sampled tokens"),
    Metric("rollout/logprob_gap", "nats", "mean |engine - learner log-prob| when old log-probs are recomputed"),
    Metric("rollout/logprob_gap", "nats", "its largest", ("max",)),
    Metric(
        "rollout/generated_tokens", "tokens", "sampled tokens per update: those of the rollout batch over its updates"
    ),
    Metric(
        "rollout/prefix_cache_hits", "share", "context tokens that the engine had in its prefix cache (with replay)"
    ),
    # starting states (VSR), with replay.ratio above 0
    Metric("replay/drawn", "count", "prefixes in the rollout batch"),
    Metric("replay/shortfall", "count", "fresh prompts in the place of prefixes that the buffer could not give"),
    Metric("replay/size", "count", "prefixes in the buffer"),
    Metric("replay/trajectories", "count", "trajectories in the buffer"),
    Metric("replay/expert_share", "share", "trajectories in the buffer that are an expert's"),
    Metric("replay/age", "batches", "rollout batches since a trajectory was inserted", ("mean", "max")),
    Metric("replay/position", "tokens", "response tokens of a prefix in the buffer", ("mean",)),
    Metric("replay/position_fraction", "share", "the same as a share of its response", ("mean",)),
    Metric("replay/score", "1", "sigma-hat over the prefixes in the buffer", ("mean", "p10", "p50", "p90")),
    Metric("replay/score", "share", "prefixes of score 0, which are not drawn", ("zero",)),
    Metric("replay/prefix_length", "tokens", "mean response tokens of the replayed prefixes in the update"),
    Metric("replay/groups", "count", "groups in the update by origin", ("fresh", "replayed")),
    Metric("replay/accuracy", "share", "responses that the verifier accepts, by origin", ("fresh", "replayed")),
    Metric("replay/mixed_groups", "share", "groups whose verdicts differ, by origin", ("fresh", "replayed")),
    Metric("reference/version", "version", "weight version of the reference policy"),
    Metric("reference/age", "updates", "optimizer updates since the reference was copied from the learner"),
    Metric("refresh/tensors", "count", "tensors of the last weight push"),
    Metric("refresh/bytes", "bytes", "size of the last weight push"),
    Metric("refresh/logprob_gap", "nats", "|engine - trainer log-prob| right after a refresh", ("mean", "max")),
    Metric("val-core/", "share", "held-out accuracy: val-core/<set>/acc/mean@<samples>"),
    Metric("val-aux/", "as named", "other held-out figures: val-aux/<set>/<figure>"),
    # time and speed
    Metric("timing_s/", "s", "wall time of a phase: gen, reward, adv, update_actor, refresh, testing, step, ..."),
    Metric("perf/throughput", "tokens/s", "prompt and response tokens per second of the whole step over the ranks"),
    Metric("perf/update_throughput", "tokens/s", "action tokens of the update per second of update_actor"),
    Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
    Metric("perf/time_per_step", "s", "wall time of the step: timing_s/step under verl's other name"),
    Metric("perf/max_memory_allocated_gb", "GiB", "peak memory of tensors on rank 0's GPU"),
    Metric("perf/max_memory_reserved_gb", "GiB", "peak memory held by torch on rank 0's GPU"),
    Metric("perf/cpu_memory_used_gb", "GiB", "resident memory of rank 0's process"),
)


def validation_key(name: str, samples: int) -> str:
    """The name of a held-out accuracy: validation_key("heldout", 4) -> "val-core/heldout/acc/mean@4"."""
    return f"val-core/{name}/acc/mean@{samples}"


def is_validation_accuracy(name: str) -> bool:
    return name.startswith("val-core/") and "/acc/" in name


class Schema:
    """Which names are known."""

    def __init__(self, metrics: Iterable[Metric] = SCHEMA) -> None:
        self.metrics = tuple(metrics)
        self._names = {name for m in self.metrics if not m.is_family for name in m.names}
        self._families = tuple(m.name for m in self.metrics if m.is_family)

    def knows(self, name: str) -> bool:
        """True for a name of the table, and for one below a family's prefix."""
        return name in self._names or any(name.startswith(f) and name != f for f in self._families)

    def unknown(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self.knows(name)]

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError for a name that the table does not hold: a metric is documented before it is logged."""
        for name in self.unknown(names):
            near = difflib.get_close_matches(name, [*self._names, *self._families], n=1)
            hint = f"the nearest known name is {near[0]}" if near else "add it to SCHEMA"
            raise ValueError(f"metric {name} is not in the schema; {hint}")


def plain(value: Any) -> float | int | None:
    """A Python number of a Python, NumPy or one-element torch value; None where it is not finite."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int):
        return int(value)
    return float(value) if math.isfinite(value) else None


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
    """`plain` for every value."""
    return {name: plain(value) for name, value in metrics.items()}


def table() -> str:
    """The schema as a Markdown table."""
    lines = ["| name | unit | meaning |", "|---|---|---|"]
    for metric in SCHEMA:
        name = f"{metric.name}…" if metric.is_family else metric.name
        if metric.endings:
            name = f"{metric.name}/{{{','.join(metric.endings)}}}" if len(metric.endings) > 1 else metric.names[0]
        lines.append(f"| `{name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def document() -> str:
    """The text of docs/metrics.md."""
    return f"""# Metrics

One line per optimizer update in `metrics.jsonl`: `{{"step": n, "name": value, ...}}`; values are finite or null.
TensorBoard gets the same names, and Weights & Biases too with `logging.wandb=true`. Step 0 is before the first update.
Names are verl's where verl has one. `…` marks a family of names. This page is printed by
`python -m megatron_rlvr.observability.metrics`; a name that is not in it is refused by the tests.

{table()}
"""


if __name__ == "__main__":
    print(document(), end="")
