r"""Verdicts of strict_box and normalized_box, on cases a person decided and on the public answer sets."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.rewards import normalized_box, strict_box

SHARED_DATA = Path(__file__).resolve().parents[2] / "../shared/data"
ANSWER_SETS = ["dapo_math_17k", "gsm8k_train", "gsm8k_test", "math500", "aime24", "aime25", "amc23"]
FRAGMENTS = [r"\boxed{", r"\boxed", "{", "}", r"\{", "7", " ", "x", "\n", r"\frac", ","]


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so the answer is \boxed{34}.", "34", True),
        (r"\boxed{35}", "34", False),
        ("34", "34", False),
        (r"\boxed{ 34 }", " 34\n", True),
        (r"\boxed{3 4}", "34", False),
        (r"\boxed{034}", "34", False),
        (r"\boxed{34.0}", "34", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", False),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", True),
        (r"first \boxed{1}, no: \boxed{2}", "2", True),
        (r"first \boxed{1}, no: \boxed{2}", "1", False),
        (r"\boxed{1} or rather \boxed{2", "1", False),
        (r"\boxed{\boxed{5}}", "5", True),
        (r"\boxed{\boxed{5}}", r"\boxed{5}", False),
        (r"\boxed {5}", "5", False),
        (r"\boxed 5", "5", False),
        (r"\fbox{5}", "5", False),
        (r"\boxed{}", "", False),
        (r"\boxed{ }", " ", False),
        ("", "", False),
        (r"\boxed{5}}}}", "5", True),
    ],
)
def test_strict_box_on_decided_cases(response: str, answer: str, right: bool) -> None:
    assert strict_box(response, answer) == (1.0 if right else -1.0)


@pytest.mark.parametrize(("tail", "right"), [(90, True), (91, True), (92, False), (200, False)])
def test_strict_box_sees_only_a_box_that_opens_in_the_last_100_characters(tail: int, right: bool) -> None:
    response = "x" * 500 + r"\boxed{7}" + "." * tail
    assert len(r"\boxed{7}") == 9
    assert strict_box(response, "7") == (1.0 if right else -1.0)
    assert normalized_box(response, "7") == 1.0


def test_strict_box_ignores_a_later_opening_outside_the_window_only() -> None:
    long_box = r"\boxed{" + "1" * 95 + "}"
    assert strict_box(long_box, "1" * 95) == -1.0
    assert strict_box(r"\boxed{" + "1" * 92 + "}", "1" * 92) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"\boxed{\dfrac{1}{2}} and so on" + "." * 300, r"\frac12", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{(1,2)}", "(12)", False),
        (r"\boxed{1} or rather \boxed{2", "1", False),
        (r"\boxed{$}", "$", False),
        (r"\boxed{27}", "27.0", True),
    ],
)
def test_normalized_box_on_decided_cases(response: str, answer: str, right: bool) -> None:
    assert normalized_box(response, answer) == (1.0 if right else -1.0)


@pytest.mark.parametrize("name", ANSWER_SETS)
def test_every_public_answer_verifies_against_itself_and_no_other(name: str) -> None:
    path = SHARED_DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the shared answer sets are not here")
    answers = [json.loads(line)["answer"] for line in path.open(encoding="utf-8")]
    for answer, other in zip(answers, answers[1:] + answers[:1], strict=True):
        response = f"The answer is $\\boxed{{{answer}}}$."
        assert strict_box(response, answer) == 1.0
        assert normalized_box(response, answer) == 1.0
        assert strict_box(response, other) == (1.0 if answer == other else -1.0)
        if _is_plain_number(answer) and _is_plain_number(other):
            assert normalized_box(response, other) == (1.0 if float(answer) == float(other) else -1.0)


def _is_plain_number(answer: str) -> bool:
    return answer.lstrip("-").replace(".", "", 1).isdigit()


def _boxes_by_definition(text: str) -> list[str | None]:
    """Every box of a text from the definition: the shortest closed piece with as many closing as opening braces."""
    boxes: list[str | None] = []
    for start in range(len(text)):
        if text.startswith(r"\boxed{", start):
            inner = text[start + 7 :]
            ends = [i for i in range(len(inner)) if inner[i] == "}" and inner[:i].count("{") == inner[:i].count("}")]
            boxes.append(inner[: ends[0]] if ends else None)
    return boxes


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join), st.sampled_from(["7", "x", "7x", r"\{7", ","]))
def test_strict_box_follows_the_definition(response: str, answer: str) -> None:
    boxes = _boxes_by_definition(response[-100:])
    right = bool(boxes) and boxes[-1] is not None and boxes[-1].strip() == answer
    assert strict_box(response, answer) == (1.0 if right else -1.0)


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_gets_a_verdict(response: str, answer: str) -> None:
    assert strict_box(response, answer) in (1.0, -1.0)
    assert normalized_box(response, answer) in (1.0, -1.0)
    assert normalized_box(rf"\boxed{{{response}", answer) in (1.0, -1.0)


@pytest.mark.parametrize(
    "unit",
    [r"\boxed{", "{", "}", "1,", r"\frac", r"\frac12", "^", ".", " ", "1,000", r"\text{", "{,}", r"\\", "\\!,", "("],
)
def test_long_responses_are_read_in_linear_time(unit: str) -> None:
    def seconds(size: int) -> float:
        text = r"\boxed{" + unit * (size // len(unit)) + "}"
        start = time.process_time()
        normalized_box(text, "1")
        strict_box(text, "1")
        return time.process_time() - start

    small = min(seconds(8_000) for _ in range(3))
    assert seconds(128_000) < 16 * 5 * small + 0.1  # quadratic time would be 256 times the small one


def test_a_megabyte_is_read_in_seconds() -> None:
    start = time.process_time()
    assert normalized_box(r"\boxed{" + r"\frac12" * 150_000 + "}", "1") == -1.0
    assert time.process_time() - start < 20
