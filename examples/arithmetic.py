"""The quickstart's task: dice added up in a chain of running totals, answered in a box.

    problem   "3+6+4+5="            response   "3,9,13,18 \\boxed{18}"

    python examples/arithmetic.py --out DIR      writes train.jsonl, heldout.jsonl, demonstrations.jsonl
    ... --terms 10 10 --experts                  longer sums; experts.jsonl: right responses to the training problems

Demonstrations are partly wrong on purpose: each addition is off by a little with some probability, and the chain goes
on from the wrong total. A model that imitates them answers correctly about as often as they do; it knows how to add and
errs because it was shown errors, which is what reinforcement learning then takes away. Response length varies with the
number of terms. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

MIN_TERMS, MAX_TERMS = 3, 6
LARGEST_TERM = 6


def make_problems(
    n: int, seed: int, exclude: Collection[str] = (), min_terms: int = MIN_TERMS, max_terms: int = MAX_TERMS
) -> list[dict[str, str]]:
    """`n` different problems {problem, answer}; none whose text is in `exclude`.

    The number of terms is uniform until the short problems run out. Raises ValueError when `n` and `exclude` are more
    than half of all problems.
    """
    if n + len(exclude) > sum(LARGEST_TERM**terms for terms in range(min_terms, max_terms + 1)) // 2:
        raise ValueError(
            f"{n} different problems of {min_terms} to {max_terms} terms are too many; draw fewer or longer ones"
        )
    rng = random.Random(seed)
    seen = set(exclude)
    problems: list[dict[str, str]] = []
    while len(problems) < n:
        terms = _draw_terms(rng, min_terms, max_terms)
        text = _problem_text(terms)
        if text in seen:
            continue
        seen.add(text)
        problems.append({"problem": text, "answer": str(sum(terms))})
    return problems


def make_demonstrations(
    n: int,
    seed: int,
    wrong_probability: float,
    exclude: Collection[str] = (),
    min_terms: int = MIN_TERMS,
    max_terms: int = MAX_TERMS,
    errors: Literal["either", "up"] = "either",
) -> list[dict[str, str]]:
    """`n` worked problems {problem, response}, possibly repeated, none in `exclude`.

    wrong_probability   chance of every single addition to be wrong
    errors              a wrong total is too small or too large; with "up" always too large, so that errors never cancel
    """
    rng = random.Random(seed)
    banned = set(exclude)
    demonstrations: list[dict[str, str]] = []
    while len(demonstrations) < n:
        terms = _draw_terms(rng, min_terms, max_terms)
        if _problem_text(terms) not in banned:
            response = _worked_response(terms, wrong_probability, rng, errors)
            demonstrations.append({"problem": _problem_text(terms), "response": response})
    return demonstrations


def make_experts(problems: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The right worked response {problem, response} to each of `make_problems`."""
    rng = random.Random(0)  # never asked: no addition is wrong
    return [
        {"problem": text, "response": _worked_response([int(term) for term in text.rstrip("=").split("+")], 0.0, rng)}
        for text in (row["problem"] for row in problems)
    ]


def _draw_terms(rng: random.Random, min_terms: int, max_terms: int) -> list[int]:
    return [rng.randint(1, LARGEST_TERM) for _ in range(rng.randint(min_terms, max_terms))]


def _problem_text(terms: Iterable[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _worked_response(terms: list[int], wrong_probability: float, rng: random.Random, errors: str = "either") -> str:
    totals = [terms[0]]
    for term in terms[1:]:
        total = totals[-1] + term
        if rng.random() < wrong_probability:
            sign = 1 if errors == "up" else rng.choice((-1, 1))
            total = abs(total + sign * rng.randint(1, 9))
        totals.append(total)
    return f"{','.join(map(str, totals))} \\boxed{{{totals[-1]}}}"


def _write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's problems and demonstrations.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--train", type=int, default=1024, help="training problems")
    parser.add_argument("--heldout", type=int, default=256, help="held-out problems")
    parser.add_argument("--demonstrations", type=int, default=32768, help="demonstrations")
    parser.add_argument("--wrong-probability", type=float, default=0.2, help="chance that an addition is wrong")
    parser.add_argument(
        "--terms", type=int, nargs=2, default=(MIN_TERMS, MAX_TERMS), metavar=("MIN", "MAX"), help="terms of a sum"
    )
    parser.add_argument("--errors", choices=("either", "up"), default="either", help="which way additions are wrong")
    parser.add_argument("--experts", action="store_true", help="write right responses to the training problems too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    heldout = make_problems(args.heldout, args.seed + 1, (), *args.terms)
    kept_out = {row["problem"] for row in heldout}
    args.out.mkdir(parents=True, exist_ok=True)
    _write_lines(args.out / "heldout.jsonl", heldout)
    train = make_problems(args.train, args.seed, kept_out, *args.terms)
    _write_lines(args.out / "train.jsonl", train)
    if args.experts:
        _write_lines(args.out / "experts.jsonl", make_experts(train))
    demonstrations = make_demonstrations(
        args.demonstrations, args.seed + 2, args.wrong_probability, kept_out, *args.terms, args.errors
    )
    _write_lines(args.out / "demonstrations.jsonl", demonstrations)
    print(f"{args.out}: {args.train} training, {args.heldout} held-out problems, {args.demonstrations} demonstrations")


if __name__ == "__main__":
    main()
