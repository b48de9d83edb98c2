"""From generations to scores: verdicts of the verifier, the answers that vote, truncation and loops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rlvr.evaluation.generation import Rows
from megatron_rlvr.evaluation.suite import VerifierConfig
from megatron_rlvr.files import write_whole
from megatron_rlvr.rewards import VerifierPool, get_verifier, normalize_notation
from megatron_rlvr.rewards.box import last_box
from megatron_rlvr.rewards.custom import MATH_VERIFY
from megatron_rlvr.rewards.verdict import Verdict, verdict
from megatron_rlvr.types import UserError

TAIL, LOOPS = 64, 4
Pair = tuple[str, str]
Judge = Callable[[Sequence[Pair]], list[Verdict]]
_BATCH = 512  # pairs between two reports of progress


@dataclass(frozen=True)
class BenchmarkScores:
    """One benchmark's scores, [problems][samples] each.

    ids, answers  [problems]
    cap           tokens
    correct       1 where the verifier accepts the response, else 0
    lengths       tokens
    truncated     1 where the response was cut at the cap
    looping       1 where its last 64 characters stand in it at least 4 times
    votes         what its last box holds, in one spelling; None: no box
    outcomes      verdicts by outcome
    """

    ids: list[str]
    answers: list[str]
    cap: int
    correct: list[list[int]]
    lengths: list[list[int]]
    truncated: list[list[int]]
    looping: list[list[int]]
    votes: list[list[str | None]]
    outcomes: dict[str, int]

    @property
    def samples(self) -> int:
        return len(self.correct[0])

    @property
    def capped(self) -> NDArray[np.bool_]:
        """[problems, samples] whether the response has as many tokens as it may: the last length bin."""
        return np.asarray(self.lengths) >= self.cap


def loops(text: str) -> bool:
    """Whether the end of a response repeats: its last 64 characters stand in it at least 4 times, not overlapping."""
    return len(text) >= TAIL * LOOPS and text.count(text[-TAIL:]) >= LOOPS


def open_judge(config: VerifierConfig) -> AbstractContextManager[Judge]:
    """The verifier of a suite, as a context that ends its processes. Raises UserError for a missing function."""
    if config.name in ("strict_box", "normalized_box"):
        verify = get_verifier(config.name)
        return nullcontext(lambda pairs: [verdict(verify(*pair) > 0) for pair in pairs])
    if config.name == "custom" and config.function is None:
        raise UserError("verifier.name=custom names no function; set verifier.function=package.module:function")
    return _PoolJudge(config)


class _PoolJudge:
    def __init__(self, config: VerifierConfig) -> None:
        self._pool = VerifierPool(
            config.workers,
            timeout=config.timeout,
            memory_gb=config.memory_gb,
            guard=config.guard,
            function=MATH_VERIFY if config.name == MATH_VERIFY else str(config.function),
        )

    def __enter__(self) -> Judge:
        return self._pool.verify

    def __exit__(self, *error: object) -> None:
        self._pool.close()


def score(rows: Rows, cap: int, judge: Judge, advance: Callable[[int], object]) -> BenchmarkScores:
    """Judge a benchmark's generations. `advance` is told the number of responses that have been judged."""
    pairs = [(response["text"], row["answer"]) for row in rows for response in row["responses"]]
    verdicts: list[Verdict] = []
    for start in range(0, len(pairs), _BATCH):
        verdicts += judge(pairs[start : start + _BATCH])
        advance(min(_BATCH, len(pairs) - start))
    found = iter(verdicts)
    correct = [[int(next(found).score > 0) for _ in row["responses"]] for row in rows]
    return BenchmarkScores(
        ids=[row["id"] for row in rows],
        answers=[row["answer"] for row in rows],
        cap=cap,
        correct=correct,
        lengths=_each(rows, lambda response: int(response["length"])),
        truncated=_each(rows, lambda response: int(response["finish_reason"] == "length")),
        looping=_each(rows, lambda response: int(loops(response["text"]))),
        votes=_each(rows, lambda response: vote(response["text"])),
        outcomes=dict(Counter(str(verdict.outcome) for verdict in verdicts)),
    )


def vote(text: str) -> str | None:
    """The answer that a response votes for: its last box in one spelling; None without one or where it is empty."""
    box = last_box(text)
    return (normalize_notation(box) or None) if box is not None else None


def save_scores(scores: Mapping[str, BenchmarkScores], path: Path) -> None:
    """Write the scores of all benchmarks as one JSON file, whole or not at all."""
    write_whole(path, json.dumps({name: asdict(found) for name, found in scores.items()}).encode())


def load_scores(path: Path) -> dict[str, BenchmarkScores]:
    """What `save_scores` wrote. Raises UserError where it is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: BenchmarkScores(**fields) for name, fields in content.items()}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name the output directory of `eval`") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path} does not hold scores; run `eval rescore` on its directory") from None


def _each(rows: Rows, value: Callable[[Mapping[str, Any]], Any]) -> list[list[Any]]:
    return [[value(response) for response in row["responses"]] for row in rows]
