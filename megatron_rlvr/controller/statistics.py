"""What a mini-batch of groups looks like, in the metric names that verl users know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlvr.types import Group


def batch_metrics(groups: Sequence[Group], learner_version: int) -> dict[str, float]:
    """Scores, rewards, advantages, lengths, group composition and staleness of one mini-batch before its update.

    learner_version   version of the weights that the update starts from; staleness counts optimizer updates per token
    """
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = np.array([t.response_length for t in trajectories])
    prompts = np.array([t.num_tokens - t.response_length for t in trajectories])
    scores = np.array([t.score for t in trajectories])
    varied = [len({t.score for t in group.trajectories}) > 1 for group in groups]
    versions = [t.versions[t.action_mask] for t in trajectories]
    staleness = learner_version - np.concatenate(versions)
    metrics = {
        "training/accuracy": float((scores.mean() + 1) / 2),
        "rollout/groups": float(len(groups)),
        "rollout/mixed_versions": float(np.mean([len(set(v.tolist())) > 1 for v in versions])),
        "rollout/entropy": float(-np.concatenate([t.behavior_logprobs[t.action_mask] for t in trajectories]).mean()),
        "rollout/informative_groups": float(np.mean(varied)),
        "response_length/clip_ratio": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "perf/total_num_tokens": float(lengths.sum() + prompts.sum()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
    metrics |= _spread("critic/score", scores)
    metrics |= _spread("critic/rewards", np.array([t.reward for t in trajectories]))
    metrics |= _spread("critic/advantages", np.array([t.advantage for t in trajectories]))
    metrics |= _spread("response_length", lengths)
    metrics |= _spread("prompt_length", prompts)
    if any(group.prompt.replayed for group in groups):
        metrics |= _by_origin(groups)
    return metrics | _reward_parts(groups)


def _by_origin(groups: Sequence[Group]) -> dict[str, float]:
    """Success and mixed-group share of fresh and of replayed groups apart, and how long the replayed prefixes are."""
    metrics = {"replay/prefix_length": float(np.mean([len(g.prompt.prefix) for g in groups if g.prompt.replayed]))}
    for origin, replayed in (("fresh", False), ("replayed", True)):
        chosen = [[t.score > 0 for t in g.trajectories] for g in groups if g.prompt.replayed is replayed]
        if chosen:
            metrics[f"replay/groups/{origin}"] = float(len(chosen))
            metrics[f"replay/accuracy/{origin}"] = float(np.mean([np.mean(verdicts) for verdicts in chosen]))
            metrics[f"replay/mixed_groups/{origin}"] = float(np.mean([len(set(verdicts)) > 1 for verdicts in chosen]))
    return metrics


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _reward_parts(groups: Sequence[Group]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.reward_parts.items():
                parts.setdefault(name, []).append(value)
    return {f"reward_parts/{name}": float(np.mean(values)) for name, values in parts.items()}
