"""Demonstrations as trajectories: ids, masks and what the packed batch of one holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_rlvr.data import build_mini_batch, load_demonstrations, load_tokenizer
from megatron_rlvr.types import UserError


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    path = tmp_path / "worked.jsonl"
    rows = [{"problem": "1 + 2 ?", "response": "1 + 2 = 3"}, {"problem": "1 ?", "response": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_demonstration_is_prompt_response_and_end(demonstrations: Path, tokenizer_directory: Path) -> None:
    first, second = load_demonstrations(demonstrations, load_tokenizer(tokenizer_directory))
    assert first.token_ids.tolist() == [1, 7, 10, 8, 12, 7, 10, 8, 11, 9, 2]
    assert first.action_mask.tolist() == [False] * 5 + [True] * 6
    assert first.behavior_logprobs.tolist() == [0.0] * 11
    assert first.versions.tolist() == [-1] * 5 + [0] * 6
    assert (first.finish_reason, first.text, first.advantage) == ("stop", "1 + 2 = 3", 1.0)
    assert math.isnan(first.score) and math.isnan(first.reward)
    assert second.token_ids.tolist() == [1, 7, 12, 7, 2]


def test_prompts_are_made_as_for_rollouts(demonstrations: Path, tokenizer_directory: Path) -> None:
    first, _ = load_demonstrations(
        demonstrations, load_tokenizer(tokenizer_directory), chat_template=True, suffix=" answer"
    )
    assert first.token_ids[~first.action_mask].tolist() == [3, 7, 10, 8, 12, 13, 4]
    assert first.token_ids[first.action_mask].tolist() == [7, 10, 8, 11, 9, 2]


def test_the_last_label_of_a_batch_is_the_end_token(demonstrations: Path, tokenizer_directory: Path) -> None:
    trajectories = load_demonstrations(demonstrations, load_tokenizer(tokenizer_directory))
    batch = build_mini_batch(
        trajectories, data_parallel_size=1, data_parallel_rank=0, micro_batch_tokens=32, layout="packed"
    )
    assert batch.num_action_tokens == 8 and batch.num_sequences == 2
    assert batch.micro_batches[0].labels.tolist() == [7, 10, 8, 11, 9, 2, 7, 2]


def test_faults_are_refused(demonstrations: Path, tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    with pytest.raises(UserError, match=r"worked\.jsonl:1 has no 'respons', its nearest key is 'response'"):
        load_demonstrations(demonstrations, tokenizer, response_key="respons")
    with pytest.raises(UserError, match="problem worked:1 has 5 tokens"):
        load_demonstrations(demonstrations, tokenizer, max_prompt_length=4)
    assert len(load_demonstrations(demonstrations, tokenizer, max_tokens=11)) == 2
    with pytest.raises(UserError, match=r"worked:1 has 11 tokens, more than the 10 .* remove the line"):
        load_demonstrations(demonstrations, tokenizer, max_tokens=10)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token; set eos_token"):
        load_demonstrations(demonstrations, tokenizer)
