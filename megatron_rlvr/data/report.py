"""What is wrong with problem sets, found before a run: missing answers, conflicts, long prompts, leaked tests."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rlvr.data.prompts import Problem, is_text, prompt_lengths, read_cells

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTATION = re.compile(r"\s+|\$|\\left|\\right|\\[,;:! ]")
SHOWN = 5  # ids that a sentence names


@dataclass(frozen=True)
class DataReport:
    """One source.

    problems    those with a text and an answer
    missing     ids of rows without a text or an answer: a run refuses them
    repeated    rows whose problem an earlier row has, with the same answer
    conflicts   ids of rows with the same problem and different answers
    too_long    ids of prompts over the limit: a run refuses them
    longest     tokens of the longest prompt; None where no tokenizer was given
    non_ascii   share of the characters of all problems that are not ASCII
    """

    source: str
    problems: list[Problem] = field(repr=False)
    missing: list[str]
    repeated: int
    conflicts: list[tuple[str, ...]]
    too_long: list[str]
    longest: int | None
    non_ascii: float

    @property
    def faults(self) -> list[str]:
        """What a run refuses, a sentence each."""
        faults = []
        if not self.problems:
            faults.append(f"{self.source} holds no problem with an answer")
        if self.missing:
            faults.append(f"{self.source} lacks a problem or an answer in {_some(self.missing)}")
        if self.too_long:
            faults.append(f"{self.source} has prompts over data.max_prompt_length: {_some(self.too_long)}")
        return faults


def inspect_source(
    source: str | Path,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template: bool = False,
    suffix: str = "",
    max_prompt_length: int = 1024,
) -> DataReport:
    """Read a source to its end whatever its values are. Raises UserError where it cannot be read or lacks a column."""
    problems, missing = [], []
    for name, _, (_, text), (_, answer) in read_cells(source, prompt_key, answer_key):
        if is_text(text) and is_text(answer):
            problems.append(Problem(name, text, answer))
        else:
            missing.append(name)
    lengths = (
        [] if tokenizer is None else prompt_lengths(problems, tokenizer, chat_template=chat_template, suffix=suffix)
    )
    long = [problem.id for problem, length in zip(problems, lengths, strict=False) if length > max_prompt_length]
    repeated, conflicts = find_repeats(problems)
    characters = sum(len(problem.text) for problem in problems)
    other = sum(len(problem.text) - len(problem.text.encode("ascii", "ignore")) for problem in problems)
    share = other / characters if characters else 0.0
    return DataReport(str(source), problems, missing, repeated, conflicts, long, max(lengths, default=None), share)


def normalize_problem(text: str) -> str:
    """One spelling for texts that differ in case, white space, dollar signs, TeX spacing or Unicode form alone."""
    return _NOTATION.sub("", unicodedata.normalize("NFKC", text)).casefold()


def find_repeats(problems: Sequence[Problem]) -> tuple[int, list[tuple[str, ...]]]:
    """(problems that repeat an earlier one with its answer, ids of one problem of each different answer to it)."""
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    repeated = 0
    for problem in problems:
        answers = seen[normalize_problem(problem.text)]
        repeated += problem.answer.strip() in answers
        answers.setdefault(problem.answer.strip(), problem.id)
    return repeated, [tuple(answers.values()) for answers in seen.values() if len(answers) > 1]


def find_overlap(train: Sequence[Problem], test: Sequence[Problem]) -> list[tuple[str, str]]:
    """(training id, test id) of every test problem that is also trained on, by `normalize_problem`."""
    known = {normalize_problem(problem.text): problem.id for problem in reversed(train)}
    found = [(known.get(normalize_problem(problem.text)), problem.id) for problem in test]
    return [(ours, theirs) for ours, theirs in found if ours is not None]


def data_warnings(sources: Sequence[tuple[str, Sequence[Problem]]]) -> list[str]:
    """What a run accepts and its author should know, a sentence each.

    sources   (name, problems) of the training set, then of the held-out sets
    """
    warnings = []
    for name, problems in sources:
        repeated, conflicts = find_repeats(problems)
        if conflicts:
            groups = [" = ".join(ids) for ids in conflicts]
            warnings.append(f"{name} has the same problem with different answers: {_some(groups)}")
        if repeated:
            warnings.append(f"{name} repeats {repeated} of its problems")
    train, ours = sources[0]
    for test, theirs in sources[1:]:
        overlap = [f"{tested} is {trained}" for trained, tested in find_overlap(ours, theirs)]
        if overlap:
            warnings.append(f"{test} is not held out from {train}: {_some(overlap)}")
    return warnings


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
