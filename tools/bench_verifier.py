r"""How many verdicts per second one core gives: bare math-verify against `VerifierPool` with one worker.

    python tools/bench_verifier.py math500.jsonl aime24.jsonl [--seconds 10]

Each response is a sentence that ends in the boxed answer; every third one boxes the next problem's answer, which is
wrong. Bare math-verify runs in this process twice, with its own alarms (its default) and without; the pool is measured
over the whole call, its messages and this process's share included. Rates are verdicts per second of processor time,
of this process and the pool's together: what one core gives, whatever else the machine does. Runs take turns, and the
best of three counts.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from megatron_rlvr.data import load_problems
from megatron_rlvr.rewards import VerifierPool
from megatron_rlvr.types import UserError

Pairs = Sequence[tuple[str, str]]
ROUNDS = 3


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Responses to the problems of a file with their answers."""
    answers = [problem.answer for problem in load_problems(path)]
    given = [answers[(n + 1) % len(answers)] if n % 3 == 0 else answer for n, answer in enumerate(answers)]
    return [(f"Adding up, we get $\\boxed{{{said}}}$.", answer) for said, answer in zip(given, answers, strict=True)]


def bare(seconds: int | None) -> Callable[[Pairs], list[bool]]:
    """math-verify as its documentation calls it, with its time limit in seconds or none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex, both = [LatexExtractionConfig()], [ExprExtractionConfig(), LatexExtractionConfig()]

    def judge(pairs: Pairs) -> list[bool]:
        return [
            verify(
                parse(f"\\boxed{{{answer}}}", latex, parsing_timeout=seconds),
                parse(response, both, parsing_timeout=seconds),
                timeout_seconds=seconds,
            )
            for response, answer in pairs
        ]

    return judge


def measure(judge: Callable[[Pairs], list[bool]], pairs: Pairs, seconds: float) -> tuple[float, list[bool]]:
    """Verdicts per second of processor time, and the verdicts on `pairs`."""
    verdicts: list[bool] = []
    done, start, used = 0, processor_seconds(), 0.0
    while used < seconds:
        verdicts = judge(pairs)
        done += len(pairs)
        used = processor_seconds() - start
    return done / used, verdicts


def processor_seconds() -> float:
    """What this process and all that it has started have used so far, reaped ones left out."""
    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts per second of math-verify and of VerifierPool.")
    parser.add_argument("problems", nargs="+", type=Path, help="JSONL with problem and answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="least time of one measurement")
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    with VerifierPool(1) as pool:
        pool.start()

        def pooled(pairs: Pairs) -> list[bool]:
            return [verdict.outcome == "correct" for verdict in pool.verify(pairs)]

        print("| problems | pairs | math-verify /s | without its alarms /s | pool /s | pool / first | pool / second |")
        print("|---|---|---|---|---|---|---|")
        for path in options.problems:
            pairs = read_pairs(path)
            judges = (bare(5), bare(None), pooled)
            best: list[float] = [0.0] * 3
            verdicts: list[list[bool]] = [[]] * 3
            for _ in range(ROUNDS):
                for index, judge in enumerate(judges):
                    rate, verdicts[index] = measure(judge, pairs, options.seconds)
                    best[index] = max(best[index], rate)
            if verdicts[0] != verdicts[2]:
                raise UserError(f"{path}: the pool's verdicts are not math-verify's; do not use this build.")
            alarms, none, ours = best
            print(
                f"| {path.stem} | {len(pairs)} | {alarms:.0f} | {none:.0f} | {ours:.0f} "
                f"| {ours / alarms:.2f} | {ours / none:.2f} |"
            )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
