"""Responses to a benchmark's problems, each kept on the disk as soon as it is there; a killed job goes on where it was.

Work goes in chunks of problems whose bounds the suite alone decides. A chunk that a kill interrupted is sampled again
as a whole, so that batches, and with them rounding, are those of an uninterrupted run; rows that are there stay.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from megatron_rlvr.data import Problem, load_problems
from megatron_rlvr.evaluation.digests import text_digest
from megatron_rlvr.evaluation.journal import Journal, read_journal
from megatron_rlvr.evaluation.suite import BenchmarkConfig, SuiteConfig
from megatron_rlvr.types import UserError

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Response:
    """One sampled response; length in tokens, the end-of-sequence token included."""

    text: str
    length: int
    finish_reason: Literal["stop", "length"]


class Sampler(Protocol):
    """What gives responses to problems: an engine in this process, or a server."""

    def check(self, problems: Sequence[Problem], benchmark: BenchmarkConfig) -> None:
        """Raise UserError for a problem that cannot be sampled, before anything is."""
        ...

    def sample(
        self, problems: Sequence[Problem], seeds: Sequence[int], benchmark: BenchmarkConfig
    ) -> Iterator[list[Response]]:
        """`benchmark.samples` responses to each problem, in order; sample j of a problem draws with its seed + j."""
        ...

    def close(self) -> None: ...


def read_problems(name: str, benchmark: BenchmarkConfig) -> list[Problem]:
    """The problems of a benchmark. Raises UserError as `load_problems` does, and for another number than expected."""
    problems = load_problems(benchmark.data, benchmark.prompt_key, benchmark.answer_key)
    if benchmark.problems is not None and len(problems) != benchmark.problems:
        raise UserError(
            f"benchmarks.{name}.data {benchmark.data} has {len(problems)} problems, but {benchmark.problems} are "
            f"expected; name the published set, or set benchmarks.{name}.problems to what the file has"
        )
    return problems[: benchmark.first]


def problem_seed(seed: int, benchmark: str, index: int) -> int:
    """30 bits from the suite's seed, the benchmark's name and the problem's place in it."""
    words = np.random.SeedSequence([seed, zlib.crc32(benchmark.encode()), index]).generate_state(1)
    return int(words[0]) >> 2


def chunks(count: int, benchmark: BenchmarkConfig, requests: int) -> Iterator[range]:
    """The problems that are sampled together: at most `requests` responses, at least one problem."""
    size = max(1, requests // benchmark.samples)
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def journal_path(output: Path, benchmark: str) -> Path:
    return output / "generations" / f"{benchmark}.jsonl"


def generate(
    suite: SuiteConfig,
    name: str,
    problems: Sequence[Problem],
    sampler: Sampler,
    identity: Mapping[str, Any],
    advance: Callable[[int], object],
) -> None:
    """Sample what the benchmark's journal lacks.

    identity  what else responses depend on, such as the model's digest: a journal made under another is refused
    advance   told the number of responses that have come in

    Raises UserError as Journal and the sampler do.
    """
    benchmark = suite.benchmarks[name]
    settings = {**identity, **journal_settings(suite, benchmark, problems)}
    with Journal(journal_path(suite.output, name), settings) as journal:
        done = {row["index"] for row in journal.rows}
        for chunk in chunks(len(problems), benchmark, suite.engine.requests):
            if done.issuperset(chunk):
                continue
            wanted = [problems[index] for index in chunk]
            seeds = [problem_seed(suite.seed, name, index) for index in chunk]
            for index, responses in zip(chunk, sampler.sample(wanted, seeds, benchmark), strict=True):
                if index not in done:
                    journal.append(_row(index, problems[index], responses))
                    advance(len(responses))


def journal_settings(suite: SuiteConfig, benchmark: BenchmarkConfig, problems: Sequence[Problem]) -> dict[str, Any]:
    """All of a suite that a benchmark's responses depend on."""
    sampling = ("samples", "greedy", "temperature", "top_p", "top_k", "max_response_length")
    texts = [part for problem in problems for part in (problem.id, problem.text, problem.answer)]
    return {
        "problems": text_digest(*texts),
        "seed": suite.seed,
        **{key: getattr(benchmark, key) for key in sampling},
        "engine": suite.engine.name,
        "requests": suite.engine.requests,
    }


def stored_responses(output: Path, name: str) -> int:
    """How many responses a benchmark's journal holds; 0 where there is none to read."""
    try:
        return sum(len(row["responses"]) for row in read_journal(journal_path(output, name))[1])
    except UserError:
        return 0


def read_generations(output: Path, name: str) -> Rows:
    """The rows of a finished journal in the order of the problems. Raises UserError where some are missing."""
    path = journal_path(output, name)
    _, rows = read_journal(path)
    rows = sorted(rows, key=lambda row: row["index"])
    if [row["index"] for row in rows] != list(range(len(rows))):
        raise UserError(f"{path} lacks responses to some problems; run the suite again to sample them")
    return rows


def _row(index: int, problem: Problem, responses: Sequence[Response]) -> dict[str, Any]:
    return {
        "index": index,
        "id": problem.id,
        "problem": problem.text,
        "answer": problem.answer,
        "responses": [asdict(response) for response in responses],
    }
