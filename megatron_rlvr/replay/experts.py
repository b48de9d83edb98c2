"""Expert trajectories for a cold start, from the same JSONL file that supervised warm-up trains on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rlvr.files import read_json_lines
from megatron_rlvr.types import Prompt, UserError

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, eq=False)
class ExpertTrajectory:
    """A solution that the policy did not write, for `PrefixBuffer.seed`.

    token_ids     [prompt_length + response tokens] int32
    success_rate  p0 of the policy on the prompt; unknown before the first rollout, and 0 is what makes experts needed:
                  sigma-hat is then sqrt(a (1 - a)), largest half-way and 0 at the bare prompt
    """

    prompt_id: str
    token_ids: NDArray[np.int32]
    prompt_length: int
    success_rate: float = 0.0


def load_expert_trajectories(
    path: str | Path,
    encode_prompt: Encode | None = None,
    encode_response: Encode | None = None,
    *,
    prompts: Iterable[Prompt] | None = None,
    success_rate: float = 0.0,
) -> list[ExpertTrajectory]:
    """One trajectory a line of a JSONL file, in file order; blank lines are skipped, other keys ignored.

    A line holds token ids, {"prompt_ids": [...], "response_ids": [...]}, or texts, {"problem": ..., "response": ...},
    which `encode_prompt` (with template and special tokens, as the run makes its prompts) and `encode_response` (with
    the end-of-sequence token) turn into ids. "id" names the prompt, otherwise "<file stem>:<line>" does.

    With `prompts`, the run's own, each line must belong to one of them, by "id" or else by equal prompt ids, and takes
    its id: only so can the prompt's later trajectories replace the expert's, and its answer judge continuations.
    Of several trajectories for one prompt a buffer keeps the last. `success_rate`: p0 given to all of them.
    Raises UserError naming file, line and remedy for a faulty line or a file that cannot be read.
    """
    path, known = Path(path), None if prompts is None else _Known(prompts)
    experts = []
    for line, where, row in read_json_lines(path, _Digits):
        prompt_ids = _ids(row, "prompt_ids", "problem", encode_prompt, where)
        response_ids = _ids(row, "response_ids", "response", encode_response, where)
        prompt_id = _prompt_id(row, f"{path.stem}:{line}", prompt_ids, known, where)
        tokens = np.array(prompt_ids + response_ids, dtype=np.int32)
        experts.append(ExpertTrajectory(prompt_id, tokens, len(prompt_ids), success_rate))
    if not experts:
        raise UserError(f"{path} holds no trajectories; write one JSON object a line into it, or name another file.")
    return experts


class _Digits(str):
    """A JSON number as it is written, told apart from a JSON string: a problem or response may be a bare number."""


class _Known:
    """A run's prompts by id and by token ids."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.by_id: dict[str, Prompt] = {}
        self.by_tokens: dict[tuple[int, ...], Prompt] = {}
        for prompt in prompts:
            self.by_id.setdefault(prompt.id, prompt)
            self.by_tokens.setdefault(tuple(prompt.token_ids), prompt)


def _prompt_id(row: dict[str, Any], default: str, prompt_ids: list[int], known: _Known | None, where: str) -> str:
    given = str(row["id"]) if "id" in row else None
    if known is None:
        return given or default
    prompt = known.by_id.get(given) if given is not None else None
    if prompt is not None and tuple(prompt.token_ids) != tuple(prompt_ids):
        raise UserError(
            f"{where} has id {given}, whose prompt has other tokens in this run; tokenise the line as the run does, "
            "or correct the id."
        )
    prompt = prompt or known.by_tokens.get(tuple(prompt_ids))
    if prompt is None:
        raise UserError(
            f"{where} solves a problem (id {given or default}) that is not among the run's prompts; "
            "add it to the training data or remove the line."
        )
    return prompt.id


def _ids(row: dict[str, Any], ids_key: str, text_key: str, encode: Encode | None, where: str) -> list[int]:
    if ids_key in row:
        return _given_ids(row[ids_key], ids_key, where)
    text = row.get(text_key)
    if not isinstance(text, str) or not text.strip():
        fault = f"has {text_key!r}: {json.dumps(text)}, not a text" if text_key in row else f"has no {text_key!r}"
        raise UserError(f"{where} {fault}, and no {ids_key!r}; give one of the two or remove the line.")
    if encode is None:
        raise UserError(f"{where} has {text_key!r} as text but no tokenizer is at hand; write {ids_key!r} or give one.")
    ids = [int(token) for token in encode(text)]
    if not ids:
        raise UserError(f"{where} has {text_key!r} without any token under this tokenizer; fill it or remove the line.")
    return ids


def _given_ids(value: Any, key: str, where: str) -> list[int]:
    limit = np.iinfo(np.int32).max
    listed = isinstance(value, list) and len(value) > 0
    if not listed or not all(isinstance(each, _Digits) and each.isdigit() and _small(each, limit) for each in value):
        raise UserError(
            f"{where} has {key!r} that is not a list of token ids in [0, {limit}]; correct or remove the line."
        )
    return [int(token) for token in value]


def _small(digits: str, limit: int) -> bool:
    return len(digits) <= 10 and int(digits) <= limit
