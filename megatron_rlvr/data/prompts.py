"""Problems from JSONL files and the prompts made of them: each text is tokenised once, here, and travels as ids."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rlvr.files import first_line, read_json_lines
from megatron_rlvr.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """One line of a data set. `id` is "<file stem>:<line>", so that a log line leads back to the file."""

    id: str
    text: str
    answer: str


def load_problems(path: str | Path, prompt_key: str = "problem", answer_key: str = "answer") -> list[Problem]:
    """The problems of a JSONL file, in file order; blank lines are skipped, other keys ignored.

    A number as problem or answer is taken as it is written (``27.0`` stays "27.0").
    Raises UserError naming file and line where the file, a key or a text is missing, or where a line is not JSON.
    """
    path = Path(path)
    problems = [
        Problem(f"{path.stem}:{line}", _text(row, prompt_key, where), _text(row, answer_key, where))
        for line, where, row in read_json_lines(path)
    ]
    if not problems:
        raise UserError(f"{path} holds no problems; write one JSON object a line into it, or name another file.")
    return problems


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

    The text of a prompt is the problem with `suffix` after it: with `chat_template` as one user message followed by
    the template's generation prompt, otherwise as it is, with the special tokens that the tokenizer itself adds.
    Raises UserError for a tokenizer without a chat template, and for a prompt that is empty or too long.
    """
    texts = [problem.text + suffix for problem in problems]
    if chat_template:
        texts = [_render_chat(tokenizer, text) for text in texts]
    all_ids = tokenizer(texts, add_special_tokens=not chat_template)["input_ids"] if texts else []
    for problem, ids in zip(problems, all_ids, strict=True):
        _check_length(problem, len(ids), max_prompt_length)
    return [
        Prompt(problem.id, tuple(ids), problem.answer, problem.text)
        for problem, ids in zip(problems, all_ids, strict=True)
    ]


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        near = difflib.get_close_matches(key, row, n=1)
        hint = f"its nearest key is {near[0]!r}" if near else f"its keys are {sorted(row)}"
        raise UserError(f"{where} has no {key!r}, {hint}; add it, or name the right key in the data section.")
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where} has {key!r}: {json.dumps(value)}, not a text or a number; fill it or remove the line."
        )
    return value


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
