"""Problems and the prompts made of them: each text is tokenised once, here, and travels as ids."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rlvr.data.schemas import ROOTS, Schema, answer_text, detect, problem_text, value_at
from megatron_rlvr.data.sources import HUB, published, read_rows
from megatron_rlvr.files import first_line
from megatron_rlvr.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A box to be filled in: \boxed{}, \boxed{<final_answer>}, \boxed{your answer}, or the bare command in a sentence.
ASKS_FOR_BOX = re.compile(
    r"\\boxed(?![A-Za-z0-9{]|\s+[0-9{])|\\boxed\s?\{\s?(?:<[^<>{}]{0,40}>|\[[^\[\]{}]{0,40}\]|\.{3}|\\[lc]?dots"
    r"|(?:\\text\{)?(?:(?:your|the|final)[ _])*answer(?:[ _]here)?\}?)?\s?\}",
    re.IGNORECASE,
)
SURROGATE = re.compile("[\ud800-\udfff]")
DEFAULT_KEYS = ("problem", "answer")
Cell = tuple[str, Any]  # column, value


@dataclass(frozen=True)
class Problem:
    """One line of a data set. `id` is "<file stem>:<line>", so that a log line leads back to the file."""

    id: str
    text: str
    answer: str


def load_problems(path: str | Path, prompt_key: str = "problem", answer_key: str = "answer") -> list[Problem]:
    """The problems of a file, a folder or "hub:<published set>" in their order; blank lines and other keys are ignored.

    Where the keys are the defaults and the first row has not both, its columns decide which published set of `schemas`
    it is. A number as
    problem or answer is taken as it is written (``27.0`` stays "27.0").
    Raises UserError naming file and line where the file, a key or a text is missing, or where a line is not JSON.
    """
    problems = []
    for name, where, text, answer in read_cells(path, prompt_key, answer_key):
        for key, value in (text, answer):
            _check_text(where, key, value)
        problems.append(Problem(name, text[1], answer[1]))
    if not problems:
        raise UserError(f"{path} holds no problems; write one JSON object a line into it, or name another file.")
    return problems


def read_cells(source: str | Path, prompt_key: str, answer_key: str) -> Iterator[tuple[str, str, Cell, Cell]]:
    """(id, "file:line", problem, answer) of every row, each as (column, value) before any check of the value.

    Raises UserError for what cannot be read and for a row without one of the columns.
    """
    wanted = ROOTS | {prompt_key.partition(".")[0], answer_key.partition(".")[0], prompt_key, answer_key}
    own = Schema("", "", "", prompt_key, answer_key)
    schema: Schema | None = published(str(source).removeprefix(HUB)) if str(source).startswith(HUB) else None
    seen: set[tuple[str, str]] = set()
    for name, where, row in read_rows(source, wanted):
        if schema is None:
            named = (prompt_key, answer_key) != DEFAULT_KEYS or (_has(row, prompt_key) and _has(row, answer_key))
            schema = own if named else detect(row) or own
        problem, answer = _value(row, schema.problem, where), _value(row, schema.answer, where)
        text, answer = problem_text(problem, schema.wrapping), answer_text(answer, schema.form)
        if schema.repeated:
            if (str(text), str(answer)) in seen:
                continue
            seen.add((str(text), str(answer)))
        yield name, where, (schema.problem, text), (schema.answer, answer)


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory, without the network. Raises UserError where there is none."""
    from transformers import AutoTokenizer  # seconds to import, needed only here

    if not Path(model_path).is_dir():
        raise UserError(f"model.path={model_path} is not a directory; name one with a Hugging Face checkpoint.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path={model_path} has no tokenizer that loads ({first_line(error)}); "
            "put the model's tokenizer.json and tokenizer_config.json there."
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes without the files
        raise UserError(
            f"model.path={model_path} has no tokenizer files; put the model's tokenizer.json and "
            "tokenizer_config.json there."
        )
    return tokenizer


def tokenize_problems(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: bool,
    suffix: str,
    max_prompt_length: int,
) -> list[Prompt]:
    """The prompts of `problems`, in order; `max_prompt_length` in tokens.

    The text of a prompt is the problem with `suffix` after it (see `with_instruction`): with `chat_template` as one
    user message followed by the template's generation prompt, otherwise as it is, with the special tokens that the
    tokenizer itself adds.
    Raises UserError for a tokenizer without a chat template, and for a prompt that is empty or too long.
    """
    all_ids = _token_ids(problems, tokenizer, chat_template=chat_template, suffix=suffix)
    for problem, ids in zip(problems, all_ids, strict=True):
        _check_length(problem, len(ids), max_prompt_length)
    return [
        Prompt(problem.id, tuple(ids), problem.answer, problem.text)
        for problem, ids in zip(problems, all_ids, strict=True)
    ]


def prompt_lengths(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool, suffix: str
) -> list[int]:
    """Tokens of each problem's prompt, as `tokenize_problems` makes it, without its limits."""
    return [len(ids) for ids in _token_ids(problems, tokenizer, chat_template=chat_template, suffix=suffix)]


def _token_ids(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool, suffix: str
) -> list[list[int]]:
    texts = [with_instruction(problem.text, suffix) for problem in problems]
    if chat_template:
        texts = [_render_chat(tokenizer, text) for text in texts]
    return tokenizer(texts, add_special_tokens=not chat_template)["input_ids"] if texts else []


def with_instruction(problem: str, suffix: str) -> str:
    r"""`problem` and `suffix`; one that asks for a ``\boxed{}`` is left out where the problem does so itself."""
    return problem if ASKS_FOR_BOX.search(suffix) and ASKS_FOR_BOX.search(problem) else problem + suffix


def _has(row: Mapping[str, Any], key: str) -> bool:
    try:
        value_at(row, key)
    except KeyError:
        return False
    return True


def _value(row: Mapping[str, Any], key: str, where: str) -> Any:
    try:
        return value_at(row, key)
    except KeyError:
        near = difflib.get_close_matches(key, row, n=1)
        hint = f"its nearest key is {near[0]!r}" if near else f"its keys are {sorted(row)}"
        raise UserError(f"{where} has no {key!r}, {hint}; add it, or name the right key in the data section.") from None


def is_text(value: Any) -> bool:
    """Whether a cell holds something that a tokenizer takes: more than white space, and no half of a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and SURROGATE.search(value) is None


def _check_text(where: str, key: str, value: Any) -> None:
    if not is_text(value):
        shown = json.dumps(value, default=str)
        raise UserError(f"{where} has {key!r}: {shown}, not a text or a number; fill it or remove the line.")


def _render_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"data.chat_template=true, but the tokenizer {tokenizer.name_or_path} has no chat template; "
            "set data.chat_template=false or use a chat model's tokenizer."
        )
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def _check_length(problem: Problem, length: int, limit: int) -> None:
    if length == 0:
        raise UserError(f"problem {problem.id} has no tokens under this tokenizer; fill it or remove the line.")
    if length > limit:
        raise UserError(
            f"problem {problem.id} has {length} tokens, more than data.max_prompt_length={limit}; "
            "raise data.max_prompt_length or remove the line."
        )
