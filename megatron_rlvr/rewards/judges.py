"""Judges: what a verifier process runs for each pair of response and answer. Nothing here sets a signal or a timer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megatron_rlvr.rewards.custom import MATH_VERIFY, load_function, read_value
from megatron_rlvr.rewards.verdict import Verdict, verdict

Judge = Callable[[str, str], Verdict]
LONGEST_RESPONSE = 1 << 18  # characters from the end that are read: four times the published cap of 16,384 tokens


def load_judge(path: str) -> Judge:
    """The judge of an import path "package.module:function"; `MATH_VERIFY` names the built-in one.

    Raises UserError for a path that names no reward function.
    """
    if path == MATH_VERIFY:
        return math_verify_judge()
    function = load_function(path)

    def judge(response: str, answer: str) -> Verdict:
        value = read_value(path, function(response, answer))
        outcome = verdict(value["correctness"] > 0).outcome
        return Verdict(outcome, value.pop("correctness"), value)

    return judge


def math_verify_judge() -> Judge:
    r"""math-verify as evaluations use it: answer parsed as LaTeX from a ``\boxed{}``, response as expression and
    LaTeX, right where any pair of readings is equivalent.

    Its own time limits are alarms, which fail outside the main thread and cancel those of others: they stay off, and
    the parent keeps the time. Answers are parsed once for all responses of a group.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limits are off
    latex, expression = LatexExtractionConfig(), ExprExtractionConfig()

    @lru_cache(maxsize=64)
    def gold(answer: str) -> list[Any]:
        return parse(f"\\boxed{{{answer}}}", [latex], parsing_timeout=None)

    def judge(response: str, answer: str) -> Verdict:
        wanted = gold(answer)
        found = parse(response[-LONGEST_RESPONSE:], [expression, latex], parsing_timeout=None)
        if verify(wanted, found, timeout_seconds=None):
            return verdict(True)
        readable = all(any(not isinstance(reading, str) for reading in readings) for readings in (wanted, found))
        return verdict(False) if readable else Verdict("unparsable", -1.0)

    judge(r"\boxed{\frac{1}{2}+\sqrt{3}}", "0.5+\\sqrt{3}")  # build the parser's tables before the fork
    return judge
