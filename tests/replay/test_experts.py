"""Expert trajectories from JSONL, as token ids and as texts, and what is wrong with a faulty line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rlvr.replay import PrefixBuffer, load_expert_trajectories
from megatron_rlvr.types import Prompt, UserError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text.strip()]


def encode_with_end(text: str) -> list[int]:
    return [*encode(text), 0]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_ids_and_texts_give_the_same_trajectories(tmp_path: Path) -> None:
    path = write(
        tmp_path / "experts.jsonl",
        {"problem": "ab", "response": "cd", "answer": "d"},
        "",
        {"prompt_ids": [97, 98], "response_ids": [99, 100, 0], "id": "named"},
        {"problem": 12, "response": 3.50, "id": 7},
    )
    experts = load_expert_trajectories(path, encode, encode_with_end, success_rate=0.125)
    assert [expert.prompt_id for expert in experts] == ["experts:1", "named", "7"]
    assert [expert.token_ids.tolist() for expert in experts[:2]] == [[97, 98, 99, 100, 0]] * 2
    assert experts[2].token_ids.tolist() == [*encode("123.5"), 0]  # numbers count as they are written
    assert {(expert.prompt_length, expert.success_rate) for expert in experts} == {(2, 0.125)}
    buffer = PrefixBuffer(None)
    assert buffer.seed(experts) == 3 + 3 + 4
    assert all(prefix.expert for prefix in buffer.draw(9))


def test_lines_take_the_ids_of_the_runs_prompts(tmp_path: Path) -> None:
    prompts = [Prompt("train:1", (97,), "x"), Prompt("train:2", (98,), "y")]
    path = write(
        tmp_path / "experts.jsonl",
        {"problem": "b", "response": "1"},
        {"problem": "a", "response": "2", "id": "train:1"},
        {"problem": "b", "response": "3", "id": "another name"},
    )
    experts = load_expert_trajectories(path, encode, encode, prompts=prompts)
    assert [expert.prompt_id for expert in experts] == ["train:2", "train:1", "train:2"]
    for row, fault in (
        ({"problem": "c", "response": "1"}, "not among the run's prompts"),
        ({"problem": "c", "response": "1", "id": "train:1"}, "other tokens"),
    ):
        with pytest.raises(UserError, match=fault):
            load_expert_trajectories(write(tmp_path / "faulty.jsonl", row), encode, encode, prompts=prompts)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "is not JSON"),
        ("[1]", "not a JSON object"),
        ({"response": "x"}, "has no 'problem', and no 'prompt_ids'"),
        ({"problem": "x"}, "has no 'response', and no 'response_ids'"),
        ({"problem": "x", "response": " "}, "'response': \" \", not a text"),
        ({"problem": None, "response": "x"}, "'problem': null, not a text"),
        ({"prompt_ids": [1], "response_ids": []}, "'response_ids' that is not a list of token ids"),
        ({"prompt_ids": [1, -2], "response_ids": [1]}, "'prompt_ids' that is not a list of token ids"),
        ({"prompt_ids": [1, 2.5], "response_ids": [1]}, "'prompt_ids' that is not a list of token ids"),
        ({"prompt_ids": ["1"], "response_ids": [1]}, "'prompt_ids' that is not a list of token ids"),
        ({"prompt_ids": [2**31], "response_ids": [1]}, "'prompt_ids' that is not a list of token ids"),
        ({"prompt_ids": "12", "response_ids": [1]}, "'prompt_ids' that is not a list of token ids"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, row: Any, fault: str) -> None:
    path = write(tmp_path / "experts.jsonl", {"problem": "a", "response": "b"}, row)
    with pytest.raises(UserError) as refused:
        load_expert_trajectories(path, encode, encode_with_end)
    assert str(refused.value).startswith(f"{path}:2 ") and fault in str(refused.value)


def test_texts_need_a_tokenizer_and_files_must_hold_something(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"experts.jsonl:1 has 'problem' as text but no tokenizer"):
        load_expert_trajectories(write(tmp_path / "experts.jsonl", {"problem": "a", "response": "b"}))
    with pytest.raises(UserError, match="holds no trajectories"):
        load_expert_trajectories(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(UserError, match="cannot be read"):
        load_expert_trajectories(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="without any token"):
        load_expert_trajectories(tmp_path / "experts.jsonl", encode, lambda text: [])
