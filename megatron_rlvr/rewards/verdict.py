"""What became of the verification of one response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Outcome = Literal["correct", "wrong", "unparsable", "timeout", "killed", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Verdict:
    """One response's verdict.

    outcome  correct, wrong
             unparsable  nothing in the response (or the answer) could be read, and the two are not the same text
             timeout     the worker was killed at its deadline
             killed      the worker ran into its memory limit or was ended by a signal from elsewhere
             crashed     the worker exited, or the reward function raised
    score    correctness alone: +1.0 or -1.0, or what a custom reward function calls correctness
    parts    other named parts of a custom reward, added to the score when it is shaped
    detail   why, where the outcome alone does not say it
    """

    outcome: Outcome
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


def verdict(correct: bool, detail: str = "") -> Verdict:
    """+1.0 for a right answer, -1.0 for a wrong one."""
    return Verdict("correct", 1.0, detail=detail) if correct else Verdict("wrong", -1.0, detail=detail)
