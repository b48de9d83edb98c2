"""Typed, checked hyperparameters: one frozen dataclass per loss, built from keywords or by a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from megatron_rlvr.losses.errors import LossError, unknown_name

Problem = str | None
LOG_WEIGHT_CLAMP = 20.0
MAX_LOG_WEIGHT_CLAMP = 80.0  # exp(80) still fits float32


@dataclass(frozen=True)
class Hyperparameters:
    """Base class: every field made by `number`, `flag`, `choice` or `count_or` is checked when the object is built."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            problem = item.metadata["problem"](value)
            if problem:
                raise LossError(f"loss hyperparameter {item.name}={value!r} is refused: {problem}.")
        self.check_relations()

    def check_relations(self) -> None:
        """Refuse combinations of values; each value alone has been checked before."""

    def warnings(self) -> list[str]:
        """Sentences about values that are allowed but break a condition of the loss's paper."""
        return []


H = TypeVar("H", bound=Hyperparameters)


def build(loss_name: str, kind: type[H], values: Mapping[str, Any]) -> H:
    """The hyperparameters of one loss from keywords; unknown names are refused with the nearest known one."""
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise unknown_name(f"hyperparameter of loss {loss_name!r}", name, known)
    return kind(**values)


def number(
    default: float | None,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
    optional: bool = False,
) -> Any:
    """A finite float in [low, high], strictly more than `above`; None allowed when `optional`."""

    def problem(value: object) -> Problem:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "give a finite number" + (" or None" if optional else "")
        if value <= above:
            return f"give a number above {above:g}"
        if not low <= value <= high:
            if high == math.inf:
                return f"give a number of at least {low:g}"
            return f"give a number up to {high:g}" if low == -math.inf else f"give a number from {low:g} to {high:g}"
        return None

    return field(default=default, metadata={"problem": problem})


def flag(default: bool) -> Any:
    """True or False."""
    return _checked(default, lambda value: None if isinstance(value, bool) else "give true or false")


def choice(default: str, *options: str) -> Any:
    """One of a few words."""
    return _checked(default, lambda value: None if value in options else f"give one of {', '.join(options)}")


def count_or(default: int | str, word: str) -> Any:
    """A positive whole number, or `word`."""

    def problem(value: object) -> Problem:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if whole or value == word else f"give a whole number from 1 or the word {word}"

    return _checked(default, problem)


def log_weight_clamp() -> Any:
    """The bound on |log W|, in nats (SPEC: 20), at most 80 so that its exponential fits float32."""
    return number(LOG_WEIGHT_CLAMP, above=0.0, high=MAX_LOG_WEIGHT_CLAMP)


def clip_range(low: float, high: float) -> tuple[float, float]:
    """The logs of 1 - low and 1 + high, so that a ratio is compared before any cap on its own log."""
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)


def _checked(default: Any, problem: Callable[[object], Problem]) -> Any:
    return field(default=default, metadata={"problem": problem})
