"""The report of tools/check_data.py, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import check_data  # noqa: E402
from make_tiny_model import build_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    build_tokenizer().save_pretrained(directory / "model")
    rows = [("1+1=", "2"), ("2+2=", "4"), ("1+1= ", "3"), ("2+2=", "4"), ("1+1+1+1+1=", "5")]
    for name, part in (("train", rows), ("clean", rows[:2]), ("test", [("2 + 2=", "4")]), ("faulty", [("1", None)])):
        lines = [json.dumps({"problem": problem, "answer": answer}) + "\n" for problem, answer in part]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    (directory / "run.yaml").write_text(
        f"run_dir: {directory / 'out'}\nmodel: {{path: {directory / 'model'}}}\n"
        f"data: {{train: {directory / 'train.jsonl'}, max_prompt_length: 10}}\n"
    )
    return directory


def test_the_table_and_a_sentence_for_each_warning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_data.main([str(place / "run.yaml"), f"data.validation={place / 'test.jsonl'}"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2].endswith("train.jsonl | 5 | 0 | 1 | 1 | 0 | 10 tokens | 0.00% |")
    assert out[3].endswith("test.jsonl | 1 | 0 | 0 | 0 | 0 | 6 tokens | 0.00% |")
    warnings = [line for line in out if line.startswith("warning: ")]
    assert [line.split(".jsonl ", 1)[1] for line in warnings] == [
        "has the same problem with different answers: train:1 = train:3.",
        "repeats 1 of its problems.",
        f"is not held out from {place / 'train.jsonl'}: test:1 is train:2.",
    ]


def test_what_a_run_refuses_exits_with_2(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_data.main([str(place / "run.yaml"), "data.max_prompt_length=9"]) == 2
    assert "fault: " in (out := capsys.readouterr().out) and "over data.max_prompt_length: train:5." in out
    assert check_data.main([str(place / "run.yaml"), f"data.train={place / 'faulty.jsonl'}"]) == 2
    assert "lacks a problem or an answer in faulty:1." in capsys.readouterr().out
    assert check_data.main([str(place / "run.yaml"), "data.train=null"]) == 2
    assert "there is nothing to check" in capsys.readouterr().err
    assert check_data.main([str(place / "run.yaml"), f"data.train={place / 'clean.jsonl'}"]) == 0
    assert "warning" not in capsys.readouterr().out
