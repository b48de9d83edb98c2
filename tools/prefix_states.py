"""Sampling for the validation of the prefix score: initial groups, one success and one failure of each, continuations.

Every engine call is one journal row and has a random stream of its own, so that a killed job goes on where it was.

    {"stage": "initial", "first": c, "groups": [{problem, scores, success, failure}]}       G responses to each problem
    {"stage": "continuations", "first": c, "states": [{source, problem, fraction, position, length, scores, tokens,
                                                       texts}]}                             n responses from each prefix
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from sampler import Sampler

from megatron_rlvr.evaluation.journal import Journal
from megatron_rlvr.types import Group, Prompt, Trajectory, UserError

Source = Literal["success", "failure", "expert"]
POSITIONS = (0.25, 0.5, 0.75)
HINTS = (0.0, *POSITIONS, 1.0)
SHORTEST = 4  # tokens of a trajectory whose three prefixes differ
INITIAL, CONTINUATIONS, ORDER = 0, 1, 2  # random streams


@dataclass(frozen=True)
class Plan:
    """How much is sampled.

    problems            with mixed outcomes that are wanted
    group_size          G: responses to each problem at first
    samples             n: continuations of each prefix
    responses_per_call  of one engine call
    """

    problems: int
    group_size: int
    samples: int
    responses_per_call: int


@dataclass(frozen=True)
class Response:
    """A trajectory that prefixes are taken from, without its problem; `stopped`: its last token ends the sequence."""

    tokens: tuple[int, ...]
    stopped: bool

    def prefix(self, fraction: float) -> tuple[int, ...]:
        """The tokens before `fraction` of the way, at least one and not all; all 1.0: all that may be continued."""
        if fraction == 1.0:
            return self.tokens[:-1] if self.stopped else self.tokens
        if fraction == 0.0:
            return ()
        length = len(self.tokens)
        return self.tokens[: min(max(math.floor(fraction * length + 0.5), 1), length - 1)]


@dataclass(frozen=True)
class State:
    """Where continuations start: `prompt` with its prefix, `fraction` of the way along a response of `length`."""

    source: Source
    prompt: Prompt
    fraction: float
    length: int


@dataclass(frozen=True)
class MixedProblem:
    """A problem with right and wrong responses in its initial group, and one of each; None: all wrong are too short."""

    prompt: Prompt
    success: Response
    failure: Response | None


def sample_initial(
    sampler: Sampler, prompts: Sequence[Prompt], plan: Plan, journal: Journal, tell: Callable[[int], object]
) -> list[MixedProblem]:
    """Sample problems in an order that the seed decides until `plan.problems` of them have mixed outcomes.

    tell   is told how many have been found so far

    Fewer come back where the problems run out. Raises UserError for none, and what Sampler.sample raises.
    """
    done = {row["first"]: row for row in journal.rows if row["stage"] == "initial"}
    order = np.random.default_rng([sampler.seed, ORDER]).permutation(len(prompts))
    shuffled, by_id = [prompts[i] for i in order], {prompt.id: prompt for prompt in prompts}
    per_call = max(1, plan.responses_per_call // plan.group_size)
    mixed: list[MixedProblem] = []
    for first in range(0, len(shuffled), per_call):
        if first not in done:
            groups = sampler.sample(shuffled[first : first + per_call], plan.group_size, INITIAL, first)
            done[first] = {"stage": "initial", "first": first, "groups": [_initial_row(group) for group in groups]}
            journal.append(done[first])
        mixed += [problem for row in done[first]["groups"] if (problem := _mixed(row, by_id)) is not None]
        tell(min(len(mixed), plan.problems))
        if len(mixed) >= plan.problems:
            break
    if not mixed:
        raise UserError(
            f"none of {len(prompts)} problems had right and wrong answers among {plan.group_size} samples, so that "
            "there is nothing to validate; take problems that this model solves at times, or raise --group-size"
        )
    return mixed[: plan.problems]


def states_of(mixed: Sequence[MixedProblem], experts: Sequence[tuple[Prompt, Response]], limit: int) -> Iterator[State]:
    """Prefixes of each success (0 to 100 %) and failure (25 to 75 %), then of each expert's trajectory (0 to 100 %).

    A prefix that leaves no token below `limit` is left out: nothing can continue it.
    """
    for problem in mixed:
        yield from _cut("success", problem.prompt, problem.success, HINTS, limit)
        if problem.failure is not None:
            yield from _cut("failure", problem.prompt, problem.failure, POSITIONS, limit)
    for prompt, response in experts:
        yield from _cut("expert", prompt, response, HINTS, limit)


def sample_continuations(
    sampler: Sampler, states: Sequence[State], plan: Plan, journal: Journal, advance: Callable[[int], object]
) -> None:
    """Journal `plan.samples` scored responses from each state. Raises what Sampler.sample raises."""
    done = {row["first"] for row in journal.rows if row["stage"] == "continuations"}
    per_call = max(1, plan.responses_per_call // plan.samples)
    for first in range(0, len(states), per_call):
        part = states[first : first + per_call]
        if first not in done:
            groups = sampler.sample([state.prompt for state in part], plan.samples, CONTINUATIONS, first)
            rows = [_continuation_row(state, group) for state, group in zip(part, groups, strict=True)]
            journal.append({"stage": "continuations", "first": first, "states": rows})
        advance(len(part))


def _cut(source: Source, prompt: Prompt, response: Response, fractions: Sequence[float], limit: int) -> Iterator[State]:
    for fraction in fractions:
        prefix = response.prefix(fraction)
        if len(prefix) < limit:
            yield State(source, replace(prompt, prefix=prefix), fraction, len(response.tokens))


def _initial_row(group: Group) -> dict[str, Any]:
    return {
        "problem": group.prompt.id,
        "scores": [int(t.score > 0) for t in group.trajectories],
        "success": _first(t for t in group.trajectories if t.score > 0),
        "failure": _first(t for t in group.trajectories if t.score <= 0),
    }


def _first(trajectories: Iterator[Trajectory]) -> dict[str, Any] | None:
    """The first long enough one; samples of a group are alike, so that it is as good as any."""
    for trajectory in trajectories:
        if trajectory.response_length >= SHORTEST:
            tokens = trajectory.token_ids[trajectory.action_mask].tolist()
            return {"tokens": tokens, "stopped": trajectory.finish_reason == "stop"}
    return None


def _mixed(row: dict[str, Any], prompts: dict[str, Prompt]) -> MixedProblem | None:
    if not 0 < sum(row["scores"]) < len(row["scores"]) or row["success"] is None:
        return None
    success, failure = (
        None if kept is None else Response(tuple(kept["tokens"]), kept["stopped"])
        for kept in (row["success"], row["failure"])
    )
    assert success is not None
    return MixedProblem(prompts[row["problem"]], success, failure)


def _continuation_row(state: State, group: Group) -> dict[str, Any]:
    return {
        "source": state.source,
        "problem": state.prompt.id,
        "fraction": state.fraction,
        "position": len(state.prompt.prefix),
        "length": state.length,
        "scores": [int(t.score > 0) for t in group.trajectories],
        "tokens": [t.response_length for t in group.trajectories],
        "texts": [t.text for t in group.trajectories],
    }
