"""The report on problem sets: each fault and each warning, with a set that has it and one that has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rlvr.data import Problem, data_warnings, find_overlap, inspect_source, load_problems, load_tokenizer
from megatron_rlvr.data.report import normalize_problem

SHARED_DATA = Path(__file__).resolve().parents[2] / "../shared/data"


def write(path: Path, rows: list[tuple[object, object]]) -> Path:
    path.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows))
    return path


def test_a_report_counts_what_a_run_refuses(tmp_path: Path, tokenizer_directory: Path) -> None:
    rows = [("1 + 2", "3"), ("1 + 2 + 3", "6"), ("é ü", "1"), ("", "2"), ("1", None), ("1", " ")]
    report = inspect_source(
        write(tmp_path / "a.jsonl", rows),
        tokenizer=load_tokenizer(tokenizer_directory),
        suffix=" ?",
        max_prompt_length=6,
    )
    assert [p.id for p in report.problems] == ["a:1", "a:2", "a:3"]
    assert report.missing == ["a:4", "a:5", "a:6"] and report.too_long == ["a:2"] and report.longest == 7
    assert report.non_ascii == pytest.approx(2 / (5 + 9 + 3))
    assert len(report.faults) == 2 and "a:4, a:5, a:6" in report.faults[0] and "a:2" in report.faults[1]
    assert inspect_source(write(tmp_path / "b.jsonl", rows[:1])).faults == []
    assert "holds no problem" in inspect_source(write(tmp_path / "c.jsonl", rows[3:])).faults[0]


def test_repeats_and_conflicts_are_told_apart() -> None:
    same = [
        Problem("a:1", "What is $x$?", "1"),
        Problem("a:2", "what  is x?", " 1 "),
        Problem("a:3", "What is y?", "1"),
    ]
    assert data_warnings([("a", same)]) == ["a repeats 1 of its problems"]
    differing = [*same, Problem("a:4", "What is\n$x$?", "2")]
    assert data_warnings([("a", differing)]) == [
        "a has the same problem with different answers: a:1 = a:4",
        "a repeats 1 of its problems",
    ]
    assert data_warnings([("a", same[::2]), ("b", [Problem("b:1", "What is z?", "1")])]) == []


def test_test_problems_that_are_trained_on_are_named() -> None:
    train = [Problem("t:1", "Find \\left( x \\right).", "1"), Problem("t:2", "Find X.", "1")]
    test = [Problem("v:1", "find $( x )$.", "9"), Problem("v:2", "Find -x.", "1")]
    assert find_overlap(train, test) == [("t:1", "v:1")]
    assert data_warnings([("t", train), ("v", test)]) == ["v is not held out from t: v:1 is t:1"]


def test_long_lists_are_cut_short() -> None:
    train = [Problem(f"t:{n}", f"Problem {n}", "1") for n in range(9)]
    (warning,) = data_warnings([("t", train), ("v", [Problem(f"v:{n}", p.text, "1") for n, p in enumerate(train)])])
    assert warning.endswith("v:3 is t:3, v:4 is t:4 and 4 more")


def test_operators_and_numbers_keep_problems_apart() -> None:
    texts = ["x+1", "x-1", "x1", "X + 2", "\\frac{1}{2}", "\\frac{12}{}"]
    assert len({normalize_problem(text) for text in texts}) == len(texts)
    assert normalize_problem("Ａ ＋ 1") == normalize_problem("a+1")


def test_the_public_training_set_holds_four_problems_of_the_public_test_set() -> None:
    if not SHARED_DATA.exists():
        pytest.skip("the shared problem sets are not here")
    train, test = (load_problems(SHARED_DATA / f"{name}.jsonl") for name in ("dapo_math_17k", "math500"))
    overlap = find_overlap(train, test)
    assert [theirs for _, theirs in overlap] == ["math500:184", "math500:253", "math500:389", "math500:492"]
    by_id = {problem.id: problem for problem in (*train, *test)}
    for ours, theirs in overlap:
        words = [set(by_id[name].text.lower().split()) for name in (ours, theirs)]
        assert len(words[0] & words[1]) > 0.6 * len(words[0] | words[1])
