"""Responses written to hang, crash or fill the memory of whatever reads them; none is ever right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

MIB = 1 << 20

KINDS: dict[str, Callable[[int], str]] = {
    "exponent tower": lambda n: box("9^{" * (3 + n % 5) + "9" + "}" * (3 + n % 5)),
    "power of ten": lambda n: box(f"10^{{10^{{{9 + n}}}}}"),
    "expression tower": lambda n: f"the answer is 9^9^9^9^{9 + n}",
    "factorial": lambda n: box(f"({10**9 + n})!"),
    "nested factorials": lambda n: box("(" * 20 + str(30 + n) + ")!" * 20),
    "binomial": lambda n: box(rf"\binom{{{10**12 + n}}}{{{10**11}}}"),
    "deep fractions": lambda n: box(r"\frac{1}{" * (500 + n) + "2" + "}" * (500 + n)),
    "deep brackets": lambda n: box("(" * (5000 + n) + "1" + ")" * (5000 + n)),
    "deep roots": lambda n: box(r"\sqrt{" * (300 + n) + "2" + "}" * (300 + n)),
    "megabyte of digits": lambda n: box("7" * MIB + str(n)),
    "megabyte of letters": lambda n: "final answer is " + "a" * MIB + str(n),
    "megabyte of dollars": lambda n: "$" * MIB + str(n),
    "megabyte of boxes": lambda n: r"\boxed{" * (MIB // 7) + str(n),
    "null bytes": lambda n: box("4\x002" + "\x00" * n),
    "open braces": lambda n: r"\boxed{" + "{" * (1000 + n),
    "closed braces": lambda n: box("}" * (1000 + n)),
    "other digits": lambda n: box("٤٢" + "４２" * (1 + n % 3)),
    "other minus": lambda n: box("−" * (1 + n % 4) + "42"),
    "half a surrogate": lambda n: box("42" + "\ud800" * (1 + n % 3)),
    "macro bomb": lambda n: (
        "".join(rf"\def\{chr(98 + k)}{{\{chr(97 + k)}\{chr(97 + k)}}}" for k in range(20)) + box(rf"\u {n}")
    ),
    "sum": lambda n: box(rf"\sum_{{k=1}}^{{10^{{{9 + n}}}}} \frac{{1}}{{k^k}}"),
    "integral": lambda n: box(rf"\int_0^{{{n + 1}}} \sin(x^{{x^x}}) e^{{\cos x}} dx"),
    "product": lambda n: box(rf"\prod_{{k=1}}^{{{10**8 + n}}} k"),
    "power to expand": lambda n: box(rf"(a+b+c+d+e+f)^{{{300 + n}}}"),
    "matrix": lambda n: box(r"\begin{pmatrix}" + r"1&2\\" * (500 + n) + r"\end{pmatrix}^{-1}"),
    "long list": lambda n: box("\\{" + ",".join(str(k) for k in range(2000 + n)) + "\\}"),
    "box in box": lambda n: r"\boxed{" * (3 + n % 50) + "41" + "}" * (3 + n % 50),
    "code": lambda n: box(f"__import__('os').system('exit {n}')"),
    "code in brackets": lambda n: f"the answer is (lambda: [0 for _ in iter(int, 1)])() + {n}",
    "attribute": lambda n: box(f"().__class__.__bases__[0].__subclasses__()[{n}]"),
    "many equations": lambda n: box("=".join(f"x_{k}" for k in range(400 + n))),
    "inequalities": lambda n: box(" < ".join(f"x^{k}" for k in range(2, 30 + n % 10))),
}


def box(content: str) -> str:
    return f"so $\\boxed{{{content}}}$"


def hostile(count: int) -> list[str]:
    """`count` responses, all kinds in turn, no two alike."""
    return [make(number) for number, make in islice(enumerate(cycle(KINDS.values())), count)]
