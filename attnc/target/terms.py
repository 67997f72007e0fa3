"""Sums, products and quotients of printed terms, without those that change nothing.

A size that the plan knows is a number in a kernel's text: one head of keys, keys that begin at 0. `tile * 1`
and `0 - BLOCK_N` make a reader look for a meaning, so they are not printed. A term of a product has to bind
as tightly as that: `factor` sees to it.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"[\w.]+(\[\w+\])?")


def factor(text: str) -> str:
    """Returns a term of a product: in brackets, unless it is a name or a number."""
    return text if _NAME.fullmatch(text) else f"({text})"


def plus(*terms: object) -> str:
    """Returns the sum."""
    return " + ".join(str(term) for term in terms if str(term) not in ("", "0")) or "0"


def minus(first: object, step: str) -> str:
    """Returns the first term less a step, which is a name or a product."""
    return f"-{step}" if str(first) == "0" else f"{first} - {step}"


def times(*factors: object) -> str:
    """Returns the product."""
    shown = [str(one) for one in factors if str(one) != "1"]
    return "0" if "0" in shown else " * ".join(shown) or "1"


def over(number: str, divisor: object, sign: str = "//") -> str:
    """Returns the quotient. sign: that of the language."""
    return number if str(divisor) == "1" else f"{number} {sign} {divisor}"


def modulo(number: str, divisor: object) -> str:
    """Returns the remainder."""
    return "0" if str(divisor) == "1" else f"{number} % {divisor}"
