"""Published problem sets in their own columns, as parquet, JSON, JSON lines, folders and from a stand-in hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_rlvr.data import SCHEMAS, Problem, load_problems
from megatron_rlvr.data.report import inspect_source
from megatron_rlvr.data.schemas import detect, problem_text
from megatron_rlvr.data.sources import download, published
from megatron_rlvr.types import UserError

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n1+1?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
# one row of each set as its data card and viewer show it, and the problem that it stands for
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dapo_math_17k": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        "1+1?",
        "34",
    ),
    "openr1_math_220k": (
        {"problem": "p", "solution": "s", "answer": r"\frac{1}{2}", "generations": ["a", "b"], "messages": []},
        "p",
        r"\frac{1}{2}",
    ),
    "gsm8k_test": ({"question": "q", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}, "q", "1200"),
    "math500": (
        {"problem": "p", "solution": "s", "answer": "p - q", "subject": "A", "level": 2, "unique_id": "u"},
        "p",
        "p - q",
    ),
    "aime24": ({"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u", "year": "2024"}, "p", "204"),
    "aime24_jia": ({"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}, "p", "204"),
    "aime25": ({"problem": "p", "answer": "70", "id": "0"}, "p", "70"),
    "amc23": ({"id": 0, "question": "q", "answer": 27.0, "url": "u"}, "q", "27"),
    "olympiadbench": (
        {"id": 1, "question": "q", "solution": ["s"], "final_answer": ["$\\frac{1}{2}$"], "context": None},
        "q",
        r"\frac{1}{2}",
    ),
    "minervamath": ({"question": "q", "answer": "4.49e33"}, "q", "4.49e33"),
    "gaokao2023en": ({"question": "q", "answer": "(2,3)"}, "q", "(2,3)"),
}


def hub(folder: Path, rows: list[dict[str, Any]], name: str) -> Any:
    """What the hub's client would do for a set of that name: put the files that were asked for into a folder."""
    schema = published(name)

    def fetch(repository: str, repo_type: str, allow_patterns: list[str]) -> str:
        assert (repository, repo_type, allow_patterns) == (schema.repository, "dataset", [schema.files])
        folder.mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / "part-0.parquet")
        return str(folder)

    return fetch


@pytest.mark.parametrize("name", ROWS)
def test_each_published_set_is_read_from_its_own_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    row, text, answer = ROWS[name]
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub(folder, [row, row], name))
    expected = [Problem("part-0:1", text, answer), Problem("part-0:2", text, answer)]
    if published(name).repeated:
        del expected[1]
    assert load_problems(f"hub:{name}") == expected
    assert load_problems(folder) == expected  # the same files by hand: found out from their columns


def test_text_answers_are_not_taken_for_floats_and_a_solution_without_its_mark_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"question": "q", "answer": "3.50"}\n{"question": "r", "answer": "4.0"}\n')
    assert [problem.answer for problem in load_problems(tmp_path / "text.jsonl")] == ["3.50", "4.0"]
    (tmp_path / "gsm.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{"question": "r", "answer": "so 2"}\n')
    with pytest.raises(UserError, match=r"gsm.jsonl:2 has 'answer': null"):
        load_problems(tmp_path / "gsm.jsonl")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl").write_text('{"problem": "a\\ud800", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"half.jsonl:1 has 'problem'"):
        load_problems(tmp_path / "half.jsonl")
    assert inspect_source(tmp_path / "half.jsonl").missing == ["half:1"]


def test_the_table_has_every_set_of_the_suites_once() -> None:
    names = [schema.name for schema in SCHEMAS]
    assert len(set(names)) == len(names) and set(ROWS) <= set(names) and {"gsm8k_train", "amc24"} <= set(names)
    sizes = {schema.name: schema.problems for schema in SCHEMAS}
    assert (sizes["aime24"], sizes["aime25"], sizes["amc23"], sizes["amc24"]) == (30, 30, 40, 45)
    assert (sizes["olympiadbench"], sizes["minervamath"], sizes["math500"], sizes["gsm8k_test"]) == (
        674,
        272,
        500,
        1319,
    )


def test_parquet_reads_only_the_columns_that_it_needs(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "answer": float(n) / 2, "generations": ["x" * 100] * 8} for n in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
    assert load_problems(tmp_path / "set.parquet") == [Problem(f"set:{n + 1}", f"p{n}", str(n / 2)) for n in range(3)]
    with pytest.raises(UserError, match=r"set\.parquet:1 has no 'question', its keys are \['answer', 'problem'\]"):
        load_problems(tmp_path / "set.parquet", "question", "solution")


def test_a_folder_is_its_files_in_order_and_hidden_ones_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"problem": "3", "answer": "3"}\n')
    (tmp_path / "a.json").write_text(json.dumps([{"problem": "1", "answer": 1.50}, {"problem": "2", "answer": "2"}]))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "c.jsonl").write_text("no JSON")
    (tmp_path / "README.md").write_text("no data")
    assert load_problems(tmp_path) == [Problem("a:1", "1", "1.5"), Problem("a:2", "2", "2"), Problem("b:1", "3", "3")]


def test_nested_keys_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"task": {"text": "1+1", "key": {"gold": 2}}, "a.b": "x"}\n')
    assert load_problems(tmp_path / "a.jsonl", "task.text", "task.key.gold") == [Problem("a:1", "1+1", "2")]
    assert load_problems(tmp_path / "a.jsonl", "task.text", "a.b")[0].answer == "x"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"no parquet", r"a\.parquet is not a parquet file that can be read .*; copy it again"),
        ("a.json", b'[{"problem": "1"', r"a\.json is not JSON"),
        ("a.json", b"[5]", r"a\.json: element 1 is not a JSON object"),
        ("a.jsonl", b'{"prompt": [{"role": "user", "content": "a"}], "answer": "2"}', r"a\.jsonl:1 has no 'problem'"),
    ],
)
def test_files_that_hold_no_problems_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_problems(tmp_path / name)


def test_a_chat_without_one_user_message_is_no_problem() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert problem_text([system, user]) == "u"
    assert problem_text([user, user]) == [user, user]
    assert detect({"prompt": [user, user], "reward_model": {"ground_truth": "1"}}) is None


def test_the_hub_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="hub:gsm8k is not a published set that is known here; use hub:gsm8k_t"):
        load_problems("hub:gsm8k")

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    with pytest.raises(UserError) as error:
        download(published("math500"), offline)
    assert str(error.value) == (
        "hub:math500 cannot be downloaded (no route); copy test.jsonl of HuggingFaceH4/MATH-500 to this machine and "
        "name the file or folder instead."
    )
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(
        UserError, match="hub:math500 needs huggingface_hub, which is not installed; install it, or copy"
    ):
        load_problems("hub:math500")
