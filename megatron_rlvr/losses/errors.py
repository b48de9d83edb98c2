"""The two ways a loss refuses to run: a bad setting or shape, and a number that is not one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron_rlvr.types import UserError


class LossError(UserError, ValueError):
    """An unknown name, a value out of range or tensors that do not fit together."""


class NonFiniteLogprobError(UserError, FloatingPointError):
    """NaN (or +inf) among the inputs; the message names the sequence, `sequence` holds it; the update stops."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence


def unknown_name(kind: str, name: str, known: Iterable[str]) -> LossError:
    """The error for a misspelt name: says which known one is nearest."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}? Known: {', '.join(known)}" if nearest else "it takes none"
    return LossError(f"{kind} {name!r} is unknown: {hint}.")
