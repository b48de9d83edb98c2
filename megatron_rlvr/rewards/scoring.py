"""Scores and rewards of a rollout batch: the verifier's verdict, then shaping on top of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from megatron_rlvr.rewards.box import last_box, normalized_box, strict_box
from megatron_rlvr.rewards.custom import MATH_VERIFY
from megatron_rlvr.rewards.overlong import overlong_penalty
from megatron_rlvr.rewards.pool import Pair, VerifierPool
from megatron_rlvr.rewards.verdict import OUTCOMES, Outcome, Verdict, verdict
from megatron_rlvr.types import Group, Trajectory, UserError

Verifier = Callable[[str, str], float]
CUSTOM = "custom"


def get_verifier(name: str) -> Verifier:
    """The function (response, answer) -> +1.0 or -1.0 of that name. Raises UserError for another name."""
    verifiers: dict[str, Verifier] = {"strict_box": strict_box, "normalized_box": normalized_box}
    if name not in verifiers:
        names = ", ".join([*verifiers, MATH_VERIFY, CUSTOM])
        raise UserError(f"rewards.name={name} is not a verifier; use one of {names}.")
    return verifiers[name]


class Scorer:
    """Fills `score`, `reward` and `reward_parts` of trajectories. A context that ends the verifier's processes.

    name                 strict_box or normalized_box, which run here; math_verify or custom, in a VerifierPool
    function             custom: import path "package.module:function" of the reward function
    guard                math_verify: reject other units, bases and brackets (`guards.mismatch`)
    overlong_start       tokens from which the overlong penalty grows (None: no penalty)
    max_response_length  cap on a response in tokens, where the penalty reaches -1
    format_penalty       taken off a response without a closed box
    workers, timeout, memory_gb   of the VerifierPool

    `score` is correctness alone: dynamic sampling and accuracy go by it. `reward` is the sum of the parts:
    `correctness`, what else a custom function returned, and the penalties that are on. A length counts a replayed
    prefix, as the cap does. `counts` says how many verdicts of each outcome there have been.
    Raises UserError for an unknown name, a faulty function, or a penalty that starts at or past the cap.
    """

    def __init__(
        self,
        name: str,
        *,
        function: str | None = None,
        guard: bool = False,
        overlong_start: int | None = None,
        max_response_length: int | None = None,
        format_penalty: float = 0.0,
        workers: int = 2,
        timeout: float = 30.0,
        memory_gb: float = 2.0,
    ) -> None:
        _check_overlong(overlong_start, max_response_length)
        self._overlong_start, self._limit, self._format_penalty = overlong_start, max_response_length, format_penalty
        self._counts: Counter[Outcome] = Counter({outcome: 0 for outcome in OUTCOMES})
        self._pool: VerifierPool | None = None
        if name == CUSTOM and function is None:
            raise UserError("rewards.name=custom names no function; set rewards.function=package.module:function.")
        if name in (MATH_VERIFY, CUSTOM):
            judge = MATH_VERIFY if name == MATH_VERIFY else str(function)
            self._pool = VerifierPool(workers, timeout=timeout, memory_gb=memory_gb, guard=guard, function=judge)
        else:
            self._verify = get_verifier(name)

    @property
    def counts(self) -> dict[str, int]:
        """Verdicts so far by outcome."""
        return {str(outcome): count for outcome, count in self._counts.items()}

    def score(self, groups: Sequence[Group]) -> None:
        """Score every trajectory of `groups`, in place; earlier scores are replaced."""
        owners = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        verdicts = self._judge([(trajectory.text, group.prompt.answer) for group, trajectory in owners])
        self._counts.update(found.outcome for found in verdicts)
        for (group, trajectory), found in zip(owners, verdicts, strict=True):
            trajectory.score = found.score
            penalties = self._penalties(trajectory, len(group.prompt.prefix))
            _check_names(found.parts, penalties)
            trajectory.reward_parts = {"correctness": found.score, **found.parts, **penalties}
            trajectory.reward = sum(trajectory.reward_parts.values())

    def close(self) -> None:
        """End the verifier's processes; a second call does nothing."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge(self, pairs: Sequence[Pair]) -> list[Verdict]:
        if self._pool is not None:
            return self._pool.verify(pairs)
        return [verdict(self._verify(response, answer) > 0) for response, answer in pairs]

    def _penalties(self, trajectory: Trajectory, prefix: int) -> dict[str, float]:
        parts = {}
        if self._overlong_start is not None and self._limit is not None:
            length = prefix + trajectory.response_length
            parts["overlong"] = overlong_penalty(length, self._overlong_start, self._limit)
        if self._format_penalty:
            parts["format"] = 0.0 if last_box(trajectory.text) is not None else -self._format_penalty
        return parts


def score_groups(
    groups: Sequence[Group], *, name: str, overlong_start: int | None = None, max_response_length: int | None = None
) -> None:
    """Score `groups` once, in place, with a `Scorer` of these settings. Raises what it raises."""
    with Scorer(name, overlong_start=overlong_start, max_response_length=max_response_length) as scorer:
        scorer.score(groups)


def training_accuracy(score: float) -> float:
    """The share of right answers that a mean score (or shaped reward) in [-1, 1] stands for: (score + 1) / 2."""
    return (score + 1) / 2


def _check_names(parts: Mapping[str, float], penalties: Mapping[str, float]) -> None:
    for name in penalties.keys() & parts.keys():
        raise UserError(
            f"rewards.function returned a part {name!r}, which a penalty of the rewards section sets too; "
            "give the part another name or leave the penalty out."
        )


def _check_overlong(start: int | None, limit: int | None) -> None:
    if start is not None and (limit is None or not 0 < start < limit):
        raise UserError(
            f"rewards.overlong_start={start} does not lie below rollout.max_response_length={limit}; "
            "lower it, raise the cap, or leave it out for no penalty."
        )
