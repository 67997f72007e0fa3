"""Named constants of a kernel's text."""

from __future__ import annotations

import math
import re
from typing import TypeAlias

from attnc.plan.ir import Kernel
from attnc.plan.scores import LOG2E
from attnc.plan.softmax import top_of

#: Name, value, comment.
Number: TypeAlias = tuple[str, str, str]


def numbers_in(code: str, kernel: Kernel, *, tanh: bool = False) -> list[Number]:
    """Constants that a kernel mentions, given its text without comments; tanh: it calls the function, which
    mentions one.
    """
    used = f"{code} TWO_LOG2E" if tanh else code
    return [number for number in _constants(kernel) if re.search(rf"\b{number[0]}\b", used)]


def _constants(kernel: Kernel) -> tuple[Number, ...]:
    """Those that a kernel's text may mention."""
    softmax = kernel.softmax
    return (
        ("SCALE", repr(softmax.scale), "factor of the raw score in base-2 units"),
        ("LAZY", repr(softmax.threshold), "growth of the maximum, in base-2 units, that forces a rescale"),
        *_headroom(kernel),
        *_unified(kernel),
        ("LN2", repr(math.log(2)), "log(2): lse leaves in natural units"),
        ("LOG2E", repr(LOG2E), "log2(e): lse comes in natural units"),
        ("TWO_LOG2E", repr(2 * LOG2E), "exp(2 x) = exp2(2 log2(e) x)"),
    )


def _headroom(kernel: Kernel) -> tuple[Number, ...]:
    headroom = kernel.softmax.headroom
    if not headroom:
        return ()
    top = top_of(kernel.bound.p_dtype)
    return (
        (
            "ABOVE",
            repr(headroom - top),
            "what exponents subtract lies so far above the maximum, in base-2 units",
        ),
        ("LIMIT", repr(2.0**top), f"sum of p by which the maximum has grown by about {headroom:g}"),
    )


def _unified(kernel: Kernel) -> tuple[Number, ...]:
    unified = kernel.unified
    if unified is None:
        return ()
    return (
        ("PHI", repr(unified.phi), "the maximum that every row subtracts, in base-2 units"),
        ("LOW", repr(unified.low), "least exponent that a row's largest may have, in base-2 units"),
        ("HIGH", repr(unified.high), "and the largest"),
    )
