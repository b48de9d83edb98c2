r"""Every verdict of the shortcut is math-verify's, and what it could not know it leaves to math-verify."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest

from megatron_rlvr.rewards.judges import Judge, math_verify_judge
from megatron_rlvr.rewards.shortcut import _claims, boxed_number, number, shortcut

BEFORE = [
    "", "So ", "The final answer is ", "The final answer is: ", "**Final Answer**\n\n", "Final answer\nis ", "Answer: ",
    "The answer: 7, thus ", "x = 3, $x=4$ and ", "We pay $5 and 7\\$ so ", "$$a+b$$ then ", "\\[ x \\] gives ",
    "The final answer, which is $7$, is ", "final answer is 3 or ", "The final answer is $3$ and ", "$3$, ", "$3$ or ",
    "\\frac{1}{2} ", "a {b} c} ", "$10 \\% of$ ", "\\boxed{7} and ", "= ", "final answer is", "[", "2$ ", "1, ",
]  # fmt: skip
AROUND = [("$", "$"), ("", ""), ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("**", "**"), ("$x=", "$"), ("$", "$$")]
AFTER = ["", "", ".", "\n", " %", " I hope it is correct.", " \\%", "}"]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return math_verify_judge()


def written(rng: random.Random) -> str:
    upper, lower = rng.choice([0, 1, 12, 999, 123456, rng.randrange(10**6)]), rng.choice([1, 2, 3, 999999])
    forms: list[Callable[[], str]] = [
        lambda: str(upper),
        lambda: str(rng.randrange(10**15)),
        lambda: f"\\frac{{{upper}}}{{{lower}}}",
        lambda: f"{upper}/{lower}",
        lambda: f"\\dfrac{{{2 * upper}}}{{{2 * lower % 10**6}}}",
    ]
    return rng.choice(["", "", "-"]) + rng.choice(forms)()


def test_every_verdict_is_math_verifys(judge: Judge) -> None:
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(700):
        given = written(rng)
        answer = given if rng.random() < 0.4 else written(rng)
        opener, closer = rng.choice(AROUND)
        before = "".join(rng.choice(BEFORE) for _ in range(rng.randrange(3)))
        response = f"{before}{opener}\\boxed{{{given}}}{closer}{rng.choice(AFTER)}"
        verdict = shortcut(response, answer)
        if verdict is not None:
            seen[verdict] += 1
            assert (judge(response, answer).outcome == "correct") == verdict, (response, answer)
    assert seen[True] > 60 and seen[False] > 60


@pytest.mark.parametrize(
    ("response", "answer", "verdict"),
    [
        (r"so $\boxed{204}$.", "204", True),
        (r"so $\boxed{204}$.", "205", False),
        (r"\boxed{\frac{6}{4}}", "3/2", True),
        (r"The final answer is \[\boxed{-7}\]", "-7", True),
        (r"$\boxed{5}$ or maybe $\boxed{6}$", "6", None),
        (r"The final answer is $4$ and $\boxed{5}$", "5", None),
        (r"$\boxed{5}$ cm", "5", None),
        (r"$\boxed{05}$", "5", None),
        (r"$\boxed{5}$", r"\sqrt{25}", None),
        (r"$\boxed{1/0}$", "5", None),
        ("5", "5", None),
        ("", "5", None),
        (r"$\boxed{" + "9" * 16 + "}$", "9" * 16, None),
    ],
)
def test_it_answers_only_where_the_box_is_surely_the_answer(response: str, answer: str, verdict: bool | None) -> None:
    assert shortcut(response, answer) is verdict


def test_other_digits_and_long_text_are_not_read() -> None:
    assert number("٤٢") is None and number("４２") is None and number("1_000") is None and number(" 5") is None
    assert boxed_number(r"\boxed{" * 10**5 + "5") is None
    assert boxed_number(r"\boxed{5}" + " " * 10**6) is None


def test_claims_are_those_of_math_verifys_pattern_in_linear_time() -> None:
    pattern = re.compile(r"final answer.{0,100}?\s+is", re.IGNORECASE | re.DOTALL)
    pieces = ["final answer", "Final Answer", " ", "  ", "\n", "is", "x" * 30, "y" * 13, " isx", "final  answer"]
    rng = random.Random(0)
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randrange(14))) for _ in range(3000)]
    found = [_claims(text, 0) for text in texts]
    assert found == [pattern.search(text) is not None for text in texts] and 300 < sum(found) < 2700
    start = time.perf_counter()
    assert shortcut("final answer" * 8 + " " * 10**6 + r"$\boxed{5}$", "5") is True
    assert time.perf_counter() - start < 5
