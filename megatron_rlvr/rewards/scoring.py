"""Scores and rewards of a rollout batch: the verifier's verdict, then shaping on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rlvr.rewards.box import normalized_box, strict_box
from megatron_rlvr.rewards.overlong import overlong_penalty
from megatron_rlvr.types import Group, UserError

Verifier = Callable[[str, str], float]


def get_verifier(name: str) -> Verifier:
    """The function (response, answer) -> +1.0 or -1.0 of that name. Raises UserError for another name."""
    verifiers: dict[str, Verifier] = {"strict_box": strict_box, "normalized_box": normalized_box}
    if name not in verifiers:
        raise UserError(f"rewards.name={name} is not a verifier; use one of {', '.join(verifiers)}.")
    return verifiers[name]


def score_groups(
    groups: Sequence[Group], *, name: str, overlong_start: int | None = None, max_response_length: int | None = None
) -> None:
    """Fill `score`, `reward` and `reward_parts` of every trajectory, in place.

    name                 the verifier
    overlong_start       tokens from which the overlong penalty grows (None: no penalty)
    max_response_length  cap on a response in tokens, where the penalty reaches -1

    `score` is the verifier's verdict alone (dynamic sampling decides by it); `reward` adds the penalty. The parts are
    `correctness` and, where it is on, `overlong`; they sum to the reward. A length counts a replayed prefix, as the
    cap does.
    Raises UserError for an unknown name or a penalty that starts at or past the cap.
    """
    verify = get_verifier(name)
    _check_overlong(overlong_start, max_response_length)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.score = verify(trajectory.text, group.prompt.answer)
            trajectory.reward_parts = {"correctness": trajectory.score}
            if overlong_start is not None and max_response_length is not None:
                length = len(group.prompt.prefix) + trajectory.response_length
                penalty = overlong_penalty(length, overlong_start, max_response_length)
                trajectory.reward_parts["overlong"] = penalty
            trajectory.reward = sum(trajectory.reward_parts.values())


def training_accuracy(score: float) -> float:
    """The share of right answers that a mean score (or shaped reward) in [-1, 1] stands for: (score + 1) / 2."""
    return (score + 1) / 2


def _check_overlong(start: int | None, limit: int | None) -> None:
    if start is not None and (limit is None or not 0 < start < limit):
        raise UserError(
            f"rewards.overlong_start={start} does not lie below rollout.max_response_length={limit}; "
            "lower it, raise the cap, or leave it out for no penalty."
        )
