r"""Verdicts on integers and fractions without math-verify, where its verdict is certain.

math-verify looks for answers all over a response, by patterns of several priorities. Where the response holds one box
and ends with it, and no "final answer ... is" before it claims another answer, every pattern that could win leads to
that box. This module answers only then, only for plain integers and fractions on both sides, and says None otherwise.
"""

from __future__ import annotations

import re
from fractions import Fraction

# math-verify compares fractions by 15 digits: denominators of six digits keep unequal ones apart
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})")
FRACTION = re.compile(
    r"(?P<sign>-?)(?:\\[dt]?frac\{(?P<upper>[0-9]{1,6})\}\{(?P<lower>[0-9]{1,6})\}"
    r"|(?P<numerator>[0-9]{1,6})/(?P<denominator>[0-9]{1,6}))"
)
BOX = "\\boxed"
AFTER_BOX = re.compile(r"\{([^{}\\\s]{1,20}|-?\\[dt]?frac\{[0-9]+\}\{[0-9]+\})\}(\$\$|\$|\\\]|\\\)|)\s*\.?\s*")
OPENERS = {"$$": "$$", "$": "$", "\\]": "\\[", "\\)": "\\(", "": ""}
FINAL_ANSWER = re.compile(r"final answer", re.IGNORECASE)
# the parts of math-verify's "final answer.{0,100}?\s+is", which itself takes long over a long run of white space
CLAIM_PARTS = re.compile(r"(final answer)|(?<!\s)\s++is", re.IGNORECASE)
CLAIM_REACH = 100
LEADS_TO_BOX = re.compile(r"final answer is:?\s*", re.IGNORECASE)
_TAIL = 100  # longest end of a response that AFTER_BOX can match, and then some


def shortcut(response: str, answer: str) -> bool | None:
    """math-verify's verdict on `response` against `answer` where both are plain numbers; None: ask math-verify."""
    wanted = number(answer.strip())
    if wanted is None:
        return None
    found = boxed_number(response)
    return None if found is None else found == wanted


def number(text: str) -> Fraction | None:
    r"""The value of an integer of up to 15 digits, or of a fraction ``a/b``, ``\frac{a}{b}`` of up to 6 digits each."""
    if INTEGER.fullmatch(text):
        return Fraction(int(text))
    match = FRACTION.fullmatch(text)
    if match is None:
        return None
    upper, lower = (match["upper"], match["lower"]) if match["upper"] else (match["numerator"], match["denominator"])
    if int(lower) == 0:
        return None
    return Fraction(int(match["sign"] + upper), int(lower))


def boxed_number(response: str) -> Fraction | None:
    """The number in the one box that ends `response`, where math-verify would surely read the same; else None."""
    start = response.rfind(BOX, max(0, len(response) - _TAIL))
    if start < 0 or response.find(BOX) != start:
        return None
    match = AFTER_BOX.fullmatch(response, start + len(BOX))
    if match is None:
        return None
    opener = OPENERS[match[2]]
    before = response[:start]
    if not before.endswith(opener) or (not opener and before.endswith(("$", "\\(", "\\["))):
        return None
    before = before.removesuffix(opener)
    return number(match[1]) if _nothing_else_wins(before) else None


def _nothing_else_wins(before: str) -> bool:
    """Whether nothing in front of the box and its delimiter can be, or reach into, an answer of equal rank."""
    if before.endswith(("$", "\\")) or before.count("\\[") != before.count("\\]"):
        return False
    if before.count("\\(") != before.count("\\)") or before.count("$") % 2 or "fbox" in before:
        return False
    first = FINAL_ANSWER.search(before)
    if first is None or not _claims(before, first.start()):
        return True
    return LEADS_TO_BOX.fullmatch(before, first.start()) is not None


def _claims(before: str, start: int) -> bool:
    """Whether a "final answer" is followed by an "is" at most 100 characters and a run of white space later."""
    end: int | None = None
    for part in CLAIM_PARTS.finditer(before, start):
        if part[1]:
            end = part.end()
        elif end is not None and part.start() - end <= CLAIM_REACH:
            return True
    return False
