r"""Verdicts on the last \boxed{...} of a response: `strict_box` as published, `normalized_box` forgiving of notation.

Both return +1.0 or -1.0 and agree on what a box is:

- it opens with the seven characters ``\boxed{``; ``\boxed {x}``, ``\boxed 5`` and ``\fbox{x}`` are not boxes;
- the last opening decides. Of nested boxes that is the innermost; where the last one is never closed there is no
  verdict to fall back on: an answer begun and not finished is wrong, whatever was boxed before it;
- braces are counted as characters, so an escaped ``\{`` counts like a plain one, as in the published verifier;
- an empty box, or an empty answer, is never right.
"""

from __future__ import annotations

from megatron_rlvr.rewards.notation import normalize_notation

OPENING = r"\boxed{"
STRICT_WINDOW = 100


def last_box(text: str) -> str | None:
    r"""What stands inside the last ``\boxed{...}`` of `text`; None without one or where it is not closed."""
    start = text.rfind(OPENING)
    if start < 0:
        return None
    start += len(OPENING)
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
    return None


def strict_box(response: str, answer: str) -> float:
    r"""+1.0 where the last box within the last 100 characters of `response` is `answer`, character for character.

    White space around either is ignored, inside it counts. A box whose ``\boxed{`` begins before the last 100
    characters is not seen, so an answer of more than 92 characters is never right.
    """
    box = last_box(response[-STRICT_WINDOW:])
    return _verdict(box is not None and box.strip(), answer.strip())


def normalized_box(response: str, answer: str) -> float:
    """+1.0 where the last box anywhere in `response` is `answer` in another notation (see `normalize_notation`)."""
    box = last_box(response)
    return _verdict(box is not None and normalize_notation(box), normalize_notation(answer))


def _verdict(found: str | bool, wanted: str) -> float:
    return 1.0 if found and found == wanted else -1.0
