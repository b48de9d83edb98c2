r"""normalize_notation: pairs that must meet, pairs that must not, and its laws on arbitrary text."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.rewards import normalize_notation

SAME = [
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac 1 2", r"\frac{1}{2}"),
    (r"\frac1{2}", r"\frac{1}{2}"),
    (r"\frac{270}7", r"\frac{270}{7}"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac12"),
    (r"\frac123", r"\frac{1}{2}3"),
    (r"\frac\pi2", r"\frac{\pi}{2}"),
    (r"-\frac{ 3 }{ 8 }", r"-\frac38"),
    (r"1\frac{4}{5}", r"1 \frac45"),
    ("0.50", "0.5"),
    (".5", "0.5"),
    ("5.0", "5"),
    ("18.90", "18.9"),
    ("007", "7"),
    ("000", "0"),
    ("-04", "-4"),
    ("1,000", "1000"),
    ("58,500", "58500"),
    ("11,111,111,100", "11111111100"),
    ("-1,234.50", "-1234.5"),
    (r"10{,}080", "10080"),
    (r"10,\!080", "10080"),
    (r"10\,080", "10080"),
    (r"(10{,}080, 2)", "(10080,2)"),
    (r"\$1,000", "1000"),
    ("$7$", "7"),
    (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
    ("(1,2)", "( 1 , 2 )"),
    ("1,2", "1, 2"),
    (r"(2,12)\cup(12,102)", r"\left( 2, 12 \right) \cup \left( 12, 102 \right)"),
    (r"\left[\frac{\pi^2}{8},\frac{5\pi^2}{4}\right]", r"[\frac{\pi^{2}}{8}, \frac{5\pi^{2}}{4}]"),
    (r"\left\{1\pm\sqrt{5},-2\right\}", r"\{1\pm\sqrt{5},-2\}"),
    (r"x \in [-2,7]", r"x\in[-2,7]"),
    (r"\text{Evelyn}", "Evelyn"),
    ("{Evelyn}", "Evelyn"),
    (r"\textbf{(B)}", "(B)"),
    (r"5\text{ cm}", r"5\mathrm{cm}"),
    (r"\text{no solution}", "no solution"),
    (r"x^2", r"x^{2}"),
    ("4210_5", "4210_{5}"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\cot x", r"\cot  x"),
    (r"3\quad", "3"),
    ("\t12\n", "12"),
]
DIFFERENT = [
    ("1,2", "12"),
    ("1 2", "12"),
    (r"1\,2", "12"),
    ("{1}{2}", "12"),
    (r"1\left2", "12"),
    ("1, 200", "1200"),
    ("(1,200)", "(1200)"),
    ("[100,200]", "[100200]"),
    (r"\{100,200\}", r"\{100200\}"),
    (r"\left(100,200\right)", "(100200)"),
    ("1,2345", "12345"),
    ("12,34", "1234"),
    ("1,23,456", "123456"),
    ("0,123", "123"),
    ("0123,456", "123456"),
    ("1234,567", "1234567"),
    ("100,200,3", "100200,3"),
    ("0.123,456", "0.123456"),
    ("1.2.3", "1.2.30"),
    ("50", "5"),
    ("500", "5"),
    ("0.05", "0.5"),
    ("10", "1"),
    ("-5", "5"),
    (r"\frac12", "12"),
    (r"\frac{12}{}", r"\frac12"),
    (r"\frac{1}{23}", r"\frac123"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (r"50\%", "50"),
    ("-0", "0"),
    ("x^12", "x^{12}"),
    (r"\sqrt{12}", r"\sqrt12"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"3\sqrt{2}", r"\sqrt[3]{2}"),
    (r"\leftarrow", "arrow"),
    (r"\leq", r"\left q"),
    (r"\le ft(", "("),
    (r"\textcolor{red}", "red"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "(1,2)"),
    ("a", "A"),
    (r"\{1\}", "1"),
    ("4210_5", "42105"),
]
PIECES = [
    *"102.,-/xt()[]{}^_$~\\ \n",
    *["000", "12", "{,}", r"\,", r",\!", r"\{", r"\}", r"\frac", r"\dfrac", r"\sqrt", r"\text", r"\mathrm", r"\left"],
    *[r"\right", r"\$", r"\pi", r"\le", "ft", r"\quad", "\\\\"],
]
latex = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_notations_of_one_answer_meet(one: str, other: str) -> None:
    assert normalize_notation(one) == normalize_notation(other) != ""


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers_stay_apart(one: str, other: str) -> None:
    assert normalize_notation(one) != normalize_notation(other)


@settings(deadline=None)
@given(latex | st.text())
def test_a_normalized_answer_stays_as_it_is(answer: str) -> None:
    once = normalize_notation(answer)
    assert normalize_notation(once) == once


@settings(deadline=None)
@given(st.integers(0, 10**15), st.integers(0, 3), st.sampled_from([",", "{,}", r",\!", r"\,"]))
def test_grouped_numbers_are_the_number(number: int, zeros: int, separator: str) -> None:
    grouped = f"{number:,}".replace(",", separator)
    assert normalize_notation(grouped) == str(number)
    assert normalize_notation("0" * zeros + str(number)) == str(number)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=5), st.sampled_from(["( )", "[ ]", r"\{ \}"]))
def test_lists_in_brackets_keep_their_numbers(numbers: list[int], brackets: str) -> None:
    opening, closing = brackets.split()
    written = normalize_notation(opening + ",".join(map(str, numbers)) + closing)
    assert written.split(" ")[1:-1:2] == list(map(str, numbers))


@settings(deadline=None)
@given(st.decimals(0, 10**6, places=4), st.decimals(0, 10**6, places=4))
def test_decimals_meet_exactly_where_they_are_equal(one: Decimal, other: Decimal) -> None:
    assert normalize_notation(f"{one:f}") == normalize_notation(f"{one.normalize():f}")
    assert (normalize_notation(f"{one:f}") == normalize_notation(f"{other:f}")) == (one == other)
