r"""One spelling for answers that differ only in notation, so that `normalized_box` can compare them as strings.

The answer is read as TeX tokens, in one pass and in time linear in its length, and written back with one space
between tokens. Nothing is evaluated: ``\frac{1}{2}``, ``1/2``, ``0.5`` and ``50\%`` stay four different answers, and
``-0`` is not ``0``. What is made equal:

- spaces, and TeX's spacing commands (``~ \, \; \: \! \quad \qquad``): dropped, yet ``1 2`` never becomes ``12``;
- ``\text`` and its fonts (``\textbf \textit \textrm \mathrm \mbox``), with the braces that follow;
- ``\left`` and ``\right``; dollar signs, also escaped ones;
- ``\dfrac``, ``\tfrac`` and ``\frac``; unbraced arguments of ``\frac``, ``\sqrt``, ``^`` and ``_``, read as TeX reads
  them: ``\frac12`` is ``\frac{1}{2}``, and ``x^12`` is ``x^{1}2``;
- braces that enclose no argument: ``{(B)}`` is ``(B)``;
- numbers: leading zeros, trailing zeros after the point, a missing zero before it (``.50`` is ``0.5``);
- thousands separators, in groups of three only: ``1,000``, ``1{,}000``, ``1,\!000``, ``1\,000``. A plain comma inside
  brackets or with a space after it separates a list: ``(1,200)`` and ``1, 200`` are two numbers, as is ``1,2``.
"""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"""(?P<space>\s+|~|\\[\s,;:!>]|\\q?quad(?![A-Za-z]))
      | (?P<number>[0-9.]+(?:(?:,(?:\\!)?|\{,\}|\\,)[0-9.]+)*)
      | (?P<symbol>\\[A-Za-z]+|\\.|[^\\])""",
    re.VERBOSE | re.DOTALL,
)
SEPARATOR = re.compile(r"(,\\!|,|\{,\}|\\,)")
DECIMAL = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
LEADING_GROUP = re.compile(r"[1-9][0-9]{0,2}")
MIDDLE_GROUP = re.compile(r"[0-9]{3}")
LAST_GROUP = re.compile(r"[0-9]{3}(?:\.[0-9]+)?")

TEXT_COMMANDS = frozenset([r"\text", r"\textbf", r"\textit", r"\textrm", r"\mathrm", r"\mbox"])
DROPPED = frozenset([r"\left", r"\right", "$", r"\$"])
FRACTIONS = frozenset([r"\frac", r"\dfrac", r"\tfrac"])
ARGUMENTS = {r"\frac": 2, r"\sqrt": 1, "^": 1, "_": 1}
OPENING_BRACKETS = frozenset(["(", "[", r"\{", r"\langle", r"\lbrace"])
CLOSING_BRACKETS = frozenset([")", "]", r"\}", r"\rangle", r"\rbrace"])


def normalize_notation(answer: str) -> str:
    """`answer` in the one spelling that this module's docstring describes; applying it twice changes nothing more."""
    return " ".join(_Writer().write(answer))


class _Writer:
    """Turns tokens into the one spelling.

    tokens      what has been written
    wanted      arguments that the last command still waits for
    groups      for every open brace: (was it kept, arguments wanted after it closes)
    brackets    how many brackets are open; inside them plain commas separate lists
    after_text  the last token was a text command, whose braces go with it
    """

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.wanted = 0
        self.groups: list[tuple[bool, int]] = []
        self.brackets = 0
        self.after_text = False

    def write(self, answer: str) -> list[str]:
        for match in TOKEN.finditer(answer):
            if match.lastgroup == "number":
                self._number(match[0])
            elif match.lastgroup == "symbol":
                self._symbol(match[0])
        return self.tokens

    def _symbol(self, token: str) -> None:
        if token in TEXT_COMMANDS:
            self.after_text = True
        elif token in DROPPED:
            pass
        elif token == "{":
            self._open()
        elif token == "}":
            self._close()
        else:
            self._plain(r"\frac" if token in FRACTIONS else token)
        if token not in TEXT_COMMANDS:
            self.after_text = False

    def _open(self) -> None:
        """Keep the braces of an argument, ours or an unknown command's; others group nothing."""
        last = self.tokens[-1] if self.tokens else ""
        unknown_command = len(last) > 1 and last[0] == "\\" and last[1].isalpha()
        kept = self.wanted > 0 or (not self.after_text and (unknown_command or last in ("}", "]")))
        self.groups.append((kept, max(self.wanted - 1, 0)))
        self.wanted = 0
        if kept:
            self.tokens.append("{")

    def _close(self) -> None:
        self.tokens += ["{", "}"] * self.wanted  # else what follows the brace would become the missing argument
        kept, self.wanted = self.groups.pop() if self.groups else (True, 0)
        if kept:
            self.tokens.append("}")

    def _plain(self, token: str) -> None:
        if token == "[" and self.wanted and self.tokens[-1] == r"\sqrt":
            self.wanted = 0  # the index of a root, not its argument
        if self.wanted:
            self._argument(token)
            return
        self.tokens.append(token)
        self.wanted = ARGUMENTS.get(token, 0)
        self.brackets += (token in OPENING_BRACKETS) - (token in CLOSING_BRACKETS)
        self.brackets = max(self.brackets, 0)

    def _argument(self, token: str) -> None:
        """Write the braces that the input left out; a command taken as an argument gets none of its own."""
        self.tokens += ["{", token, *["{", "}"] * ARGUMENTS.get(token, 0), "}"]
        self.wanted -= 1

    def _number(self, run: str) -> None:
        """A run of digits, points and separators; TeX takes an unbraced argument from it one character at a time."""
        self.after_text = False
        if self.wanted:
            self._argument(run[0])
            self.write(run[1:])
        else:
            self.tokens += _numbers(run, in_list=self.brackets > 0)


def _numbers(run: str, *, in_list: bool) -> list[str]:
    pieces = SEPARATOR.split(run)
    numbers, separators = pieces[::2], pieces[1::2]
    if separators and _is_grouped(numbers) and not (in_list and "," in separators):
        return [_decimal("".join(numbers))]
    written = [_decimal(numbers[0])]
    for separator, number in zip(separators, numbers[1:], strict=True):
        written += [_decimal(number)] if separator == r"\," else [",", _decimal(number)]
    return written


def _is_grouped(numbers: list[str]) -> bool:
    first, *middle, last = numbers
    return bool(
        LEADING_GROUP.fullmatch(first)
        and all(MIDDLE_GROUP.fullmatch(number) for number in middle)
        and LAST_GROUP.fullmatch(last)
    )


def _decimal(number: str) -> str:
    if not DECIMAL.fullmatch(number):
        return number  # "1.2.3", "5.", "...": not a number that we know how to write
    whole, _, fraction = number.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole
