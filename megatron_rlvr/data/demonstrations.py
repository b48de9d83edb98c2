"""Worked solutions as trajectories, for supervised warm-up with the same batches and the same actor as RL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rlvr.data.prompts import load_problems, tokenize_problems
from megatron_rlvr.types import Trajectory, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_demonstrations(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str = "problem",
    response_key: str = "response",
    chat_template: bool = False,
    suffix: str = "",
    max_prompt_length: int = 1024,
    max_tokens: int | None = None,
) -> list[Trajectory]:
    """One trajectory a line: the prompt as `tokenize_problems` makes it, then the response and its end-of-sequence.

    Prompt and response are tokenised apart, as they are when the model itself goes on from a prompt. Response tokens
    are the action tokens, with behaviour log-probs 0, version 0 and advantage 1.
    Raises UserError for faulty lines (see `load_problems`), for a prompt and response of more than `max_tokens` tokens,
    and for a tokenizer without an end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token; "
            "set eos_token in its tokenizer_config.json."
        )
    problems = load_problems(path, prompt_key, response_key)
    prompts = tokenize_problems(
        problems, tokenizer, chat_template=chat_template, suffix=suffix, max_prompt_length=max_prompt_length
    )
    responses = tokenizer([problem.answer for problem in problems], add_special_tokens=False)["input_ids"]
    demonstrations = [
        demonstration(prompt.token_ids, [*response, tokenizer.eos_token_id], text=problem.answer)
        for prompt, response, problem in zip(prompts, responses, problems, strict=True)
    ]
    for problem, made in zip(problems, demonstrations, strict=True):
        if max_tokens is not None and made.num_tokens > max_tokens:
            raise UserError(
                f"demonstration {problem.id} has {made.num_tokens} tokens, more than the {max_tokens} that the model's "
                "context and actor.micro_batch_tokens allow; raise actor.micro_batch_tokens or remove the line."
            )
    return demonstrations


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int], text: str = "") -> Trajectory:
    """The trajectory of a response that was written, not sampled."""
    action_mask = np.arange(len(prompt_ids) + len(response_ids)) >= len(prompt_ids)
    return Trajectory(
        token_ids=np.array([*prompt_ids, *response_ids], dtype=np.int32),
        action_mask=action_mask,
        behavior_logprobs=np.zeros(len(action_mask), dtype=np.float32),
        versions=np.where(action_mask, 0, -1).astype(np.int32),
        finish_reason="stop",
        text=text,
        advantage=1.0,
    )
