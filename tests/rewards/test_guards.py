r"""Each guard with an answer that it accepts and one that it rejects, and math-verify's own verdict on both."""

from __future__ import annotations

import time

import pytest

from megatron_rlvr.rewards import VerifierPool
from megatron_rlvr.rewards.guards import base, brackets, mismatch, unit
from megatron_rlvr.rewards.judges import Judge, math_verify_judge

PAIRS = [
    # what is boxed and rejected, the same accepted, the answer, what the guard says
    (r"5 \text{ m}", r"5\,\text{cm}", r"5 \text{ cm}", "unit m instead of cm"),
    (r"5 \text{ square meters}", r"5\text{ m}^2", r"5 \mathrm{m}^2", None),
    (r"1010_3", r"1010_{2}", r"1010_2", "base 3 instead of 2"),
    (r"\{1,2\}", r"\left(1, 2\right)", r"(1,2)", "brackets {...} instead of (...)"),
]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return math_verify_judge()


@pytest.mark.parametrize(("rejected", "accepted", "answer", "reason"), PAIRS)
def test_each_guard_accepts_one_and_rejects_one(
    judge: Judge, rejected: str, accepted: str, answer: str, reason: str | None
) -> None:
    assert mismatch(f"$\\boxed{{{accepted}}}$", answer) is None
    assert mismatch(f"$\\boxed{{{rejected}}}$", answer) == reason
    assert judge(f"$\\boxed{{{accepted}}}$", answer).outcome == "correct"


@pytest.mark.parametrize(("given", "answer"), [(p[0], p[2]) for p in PAIRS if p[3]])
def test_without_its_guard_math_verify_lets_the_mismatch_pass(judge: Judge, given: str, answer: str) -> None:
    assert judge(f"$\\boxed{{{given}}}$", answer).outcome == "correct"


def test_a_guarded_pool_rejects_what_a_plain_one_accepts() -> None:
    pairs = [
        (f"$\\boxed{{{given}}}$", answer) for rejected, accepted, answer, _ in PAIRS for given in (rejected, accepted)
    ]
    with VerifierPool(1, guard=True) as pool:
        verdicts = pool.verify(pairs)
    assert [v.outcome for v in verdicts] == ["wrong", "correct", "correct", "correct"] + ["wrong", "correct"] * 2
    assert verdicts[0].detail == "unit m instead of cm"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"5 \text{ cm}", "cm"), (r"5\ \mathrm{cm}^2", "cm^2"), ("5 square centimeters", "cm^2"), ("5 sq. ft", "ft^2"),
        (r"3.5\text{ hours}", "h"), (r"60^\circ", "degree"), (r"60^{\circ}", "degree"), ("60 degrees", "degree"),
        (r"\frac{\pi}{3} \text{ rad}", "rad"), ("12 inches", "in"), ("6 feet", "ft"), ("7 cubic meters", "m^3"),
        ("20 km/h", "km/h"), (r"12 \text{ cents}", "cent"), (r"5\text{ apples}", None), ("x", None), ("5", None),
        (r"\text{Evelyn}", None), ("5x", None), ("m", None), (r"5 \text{ cm} + 3", None),
    ],
)  # fmt: skip
def test_units_in_one_spelling(text: str, expected: str | None) -> None:
    assert unit(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1010_2", "2"), ("1010_{2}", "2"), (r"\text{A3}_{16}", "16"), ("2A_{16}", "16"), (r"4210_{\text{five}}", None),
        ("x_1", None), ("1010", None), ("a_{12}", None), ("12_3 + 21_4", None), ("C_2", None),
    ],
)  # fmt: skip
def test_bases_of_the_one_number_that_has_one(text: str, expected: str | None) -> None:
    assert base(text) == expected


def test_one_side_that_says_nothing_is_left_to_math_verify() -> None:
    assert mismatch(r"$\boxed{5}$", r"5 \text{ cm}") is None and mismatch(r"$\boxed{5\text{ cm}}$", "5") is None
    assert mismatch(r"$\boxed{1010}$", "1010_2") is None and mismatch("no box", "1010_2") is None
    assert brackets("5") is None and brackets("(5)") is None and brackets(r"\{1, 2\}") == "{...}"


@pytest.mark.parametrize(
    "text",
    ["5" + " " * 10**5, "7" * 10**5, "5^" + "{ " * 10**5, "7 " * 10**5, "5 " + r"\," * 10**5, "5 _" + " " * 10**5],
    ids=["spaces", "digits", "braces", "numbers", "TeX spaces", "subscript"],
)
def test_a_hostile_box_costs_the_trainer_no_time(text: str) -> None:
    """Guards run outside the workers that can be killed."""
    start = time.perf_counter()
    assert mismatch(f"$\\boxed{{{text}}}$", r"5 \text{ cm}") is None
    assert time.perf_counter() - start < 5
