r"""The published problem sets: where each lives on the Hugging Face hub and which columns hold problem and answer.

A path goes through structs with dots. A problem is a text, or chat messages of which the user's is taken. An answer is

    plain        the value as it is written
    integer      a number that the set stores as a float: 27.0 is "27"
    hashes       what stands behind the last ``####`` of a worked solution, without thousands separators; None without
    list         the values of a list, joined by a comma where there are several; dollar signs around them are dropped

A file of one's own needs no entry: columns `problem` and `answer`, or data.prompt_key and data.answer_key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

AnswerForm = Literal["plain", "integer", "hashes", "list"]

_DAPO_WRAPPING = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


@dataclass(frozen=True)
class Schema:
    """One published set.

    repository  data set on the hub; files: pattern of the files there that hold the split
    problems    how many the set has (None: the repository does not say, or it has grown)
    repeated    the rows hold each problem many times (1,791,700 rows of some 17,000); the first of each is kept
    wrapping    instruction before and behind every problem of the set, taken off: the run's own comes instead
    """

    name: str
    repository: str
    files: str
    problem: str
    answer: str
    form: AnswerForm = "plain"
    problems: int | None = None
    wrapping: tuple[str, str] = ("", "")
    repeated: bool = False


SCHEMAS: tuple[Schema, ...] = (
    Schema(
        "dapo_math_17k", "BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet",
        "prompt", "reward_model.ground_truth", wrapping=_DAPO_WRAPPING, repeated=True,
    ),
    Schema("openr1_math_220k", "open-r1/OpenR1-Math-220k", "data/train-*.parquet", "problem", "answer", problems=93733),
    Schema("gsm8k_train", "openai/gsm8k", "main/train-*.parquet", "question", "answer", "hashes", 7473),
    Schema("gsm8k_test", "openai/gsm8k", "main/test-*.parquet", "question", "answer", "hashes", 1319),
    Schema("math500", "HuggingFaceH4/MATH-500", "test.jsonl", "problem", "answer", problems=500),
    Schema("aime24", "HuggingFaceH4/aime_2024", "data/train-*.parquet", "problem", "answer", problems=30),
    Schema("aime24_jia", "Maxwell-Jia/AIME_2024", "*.parquet", "Problem", "Answer", problems=30),
    Schema("aime25", "math-ai/aime25", "test*", "problem", "answer", problems=30),
    Schema("amc23", "math-ai/amc23", "*test*", "question", "answer", "integer", 40),
    Schema("amc24", "rawsh/2024_AMC12", "data/*.parquet", "problem", "answer", "integer", 45),
    Schema(
        "olympiadbench", "Hothan/OlympiadBench", "*OE_TO_maths_en_COMP*.parquet",
        "question", "final_answer", "list", 674,
    ),
    Schema("minervamath", "math-ai/minervamath", "test.jsonl", "question", "answer", problems=272),
    Schema("gaokao2023en", "MARIO-Math-Reasoning/Gaokao2023-Math-En", "*.jsonl", "question", "answer"),
)  # fmt: skip

ROOTS = frozenset(path.partition(".")[0] for schema in SCHEMAS for path in (schema.problem, schema.answer))


def detect(row: Mapping[str, Any]) -> Schema | None:
    """The first published set with the columns and the kind of answer that `row` has; None where there is none."""
    return next((schema for schema in SCHEMAS if _fits(schema, row)), None)


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a key that itself has dots goes first. Raises KeyError where there is none."""
    if path in row:
        return row[path]
    root, dot, rest = path.partition(".")
    if not dot or not isinstance(row.get(root), Mapping):
        raise KeyError(path)
    return value_at(row[root], rest)


def problem_text(value: Any, wrapping: tuple[str, str] = ("", "")) -> Any:
    """The problem in a cell: the user's message where it holds a chat, without `wrapping`; other values unchanged."""
    if isinstance(value, list | tuple):
        users = [message["content"] for message in value if _is_message(message) and message["role"] == "user"]
        if len(users) != 1:
            return value
        value = users[0]
    return value.removeprefix(wrapping[0]).removesuffix(wrapping[1]) if isinstance(value, str) else value


def answer_text(value: Any, form: AnswerForm) -> Any:
    """The answer in a cell as text; a value that has not this form, unchanged."""
    if form == "list" and isinstance(value, list | tuple) and value and all(isinstance(part, str) for part in value):
        return ", ".join(part.strip().strip("$").strip() for part in value)
    if form == "hashes" and isinstance(value, str):
        return value.rpartition("####")[2].strip().replace(",", "") if "####" in value else None
    if form == "integer" and _is_number(value) and float(value).is_integer():
        return str(int(float(value)))
    return value if isinstance(value, str) or not _is_number(value) else json.dumps(value)


def _fits(schema: Schema, row: Mapping[str, Any]) -> bool:
    try:
        problem, answer = value_at(row, schema.problem), value_at(row, schema.answer)
    except KeyError:
        return False
    if schema.form == "hashes":
        return isinstance(answer, str) and "####" in answer
    if schema.form == "integer" and not (_is_number(answer) and str(answer).endswith(".0")):
        return False  # sets with the same columns hold text
    return isinstance(problem_text(problem), str) and isinstance(answer, list | tuple) == (schema.form == "list")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value.removeprefix("-").replace(".", "", 1).isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
