r"""What math-verify lets pass and a grader would not: an answer in another unit, another base, another kind of bracket.

math-verify 0.9.0 takes ``5 \text{ cm}`` for ``5 \text{ m}``, ``1010_2`` for ``1010_3`` and ``(1,2)`` for ``\{1,2\}``. A
guard looks at the text of both boxes and rejects where *both* say something and say different things: an answer that
names no unit or base where the reference does is left to math-verify.
"""

from __future__ import annotations

import re

from megatron_rlvr.rewards.box import last_box

_UNITS = {
    "length": "mm cm dm m km in ft yd mi",
    "mass": "mg g kg lb oz t",
    "time": "ms s min h day week month year",
    "volume": "ml cl dl l",
    "speed": "mph km/h m/s",
    "angle": "degree rad",
    "money": "dollar cent euro pound",
    "other": "n j w v a hz pa k mol",
}
KNOWN_UNITS = frozenset(unit for units in _UNITS.values() for unit in units.split())
UNIT_NAMES = {
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "inche": "in",
    "inch": "in",
    "feet": "ft",
    "foot": "ft",
    "yard": "yd",
    "mile": "mi",
    "gram": "g",
    "kilogram": "kg",
    "milligram": "mg",
    "ounce": "oz",
    "ton": "t",
    "sec": "s",
    "second": "s",
    "minute": "min",
    "mins": "min",
    "hour": "h",
    "hr": "h",
    "liter": "l",
    "litre": "l",
    "milliliter": "ml",
    "kmh": "km/h",
    "radian": "rad",
    "deg": "degree",
    "metre": "m",
    "centimetre": "cm",
    "kilometre": "km",
}
POWERS = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3"}
# These read what a model wrote in the trainer's own process: each takes time linear in its text, whose white space has
# been drawn together first.
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])")
_COMMAND = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|rm|operatorname)(?![A-Za-z])")
_UNIT = re.compile(
    r"[0-9)]\s*(?:(?P<power>square|sq\.?|cubic)\s+)?(?P<name>[A-Za-z]+(?:/[A-Za-z]+)?)\.?\s*(?:\^\s*(?P<exponent>[0-9]))?\s*"
)
_DEGREES = re.compile(r"\^?\s*\{?\s*\\circ\s*\}?|°|\\degree(?![A-Za-z])")
_BASE = re.compile(r"(?<![A-Za-z0-9])(?=[A-F]*+[0-9])[0-9A-F]++ ?_ ?([0-9]{1,2}) ?(?![0-9])")


def mismatch(response: str, answer: str) -> str | None:
    """Why the last box of `response` is another answer than `answer`; None where no guard objects."""
    found = last_box(response)
    if found is None:
        return None
    for what, read in (("unit", unit), ("base", base), ("brackets", brackets)):
        ours, theirs = read(found), read(answer)
        if ours is not None and theirs is not None and ours != theirs:
            return f"{what} {ours} instead of {theirs}"
    return None


def unit(text: str) -> str | None:
    """The known unit behind the number that ends `text`, in one spelling with its exponent ("cm^2"); None without."""
    plain = _DEGREES.sub(" degree ", _words(_SPACE.sub(" ", text)))
    plain = _words(_COMMAND.sub(" ", plain).replace("{", " ").replace("}", " ").replace("$", " "))
    match = next((match for match in _UNIT.finditer(plain) if match.end() == len(plain)), None)
    if match is None:
        return None
    name = match["name"].lower()
    name = UNIT_NAMES.get(name, UNIT_NAMES.get(name.removesuffix("s"), name))
    name = name if name in KNOWN_UNITS else name.removesuffix("s")
    exponent = match["exponent"] or POWERS.get(match["power"] or "", "1")
    if name not in KNOWN_UNITS:
        return None
    return name if exponent == "1" else f"{name}^{exponent}"


def base(text: str) -> str | None:
    """The subscript of the only number in `text` that has one, as in ``1010_2`` or ``A3_{16}``; None otherwise."""
    plain = _words(_COMMAND.sub("", _SPACE.sub("", text)).replace("{", " ").replace("}", " "))
    found = {match[1] for match in _BASE.finditer(plain)}
    return found.pop() if len(found) == 1 else None


def brackets(text: str) -> str | None:
    r"""Whether `text` is an ordered list in ``( )`` or a set in ``\{ \}``; None where it is neither."""
    plain = text.replace(r"\left", "").replace(r"\right", "").replace("$", "").strip()
    if "," not in plain:
        return None
    if plain.startswith("(") and plain.endswith(")"):
        return "(...)"
    return "{...}" if plain.startswith(r"\{") and plain.endswith(r"\}") else None


def _words(text: str) -> str:
    return " ".join(text.split())
