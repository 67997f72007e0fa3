"""Named constants of a kernel's text, by what the plan says that it computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from attnc.expr.nodes import Call, walk
from attnc.plan.ir import Kernel, Module, unified_of
from attnc.plan.softmax import LOG2E, top_of

#: Name, value, comment.
Number: TypeAlias = tuple[str, str, str]

#: What rows of a backward read: the lse of a call.
ROW_NUMBERS: tuple[Number, ...] = (("LOG2E", repr(LOG2E), "log2(e): lse comes in natural units"),)


def score_numbers(kernel: Kernel) -> Iterator[Number]:
    """What turns scores into exponents, in a forward and in a backward kernel."""
    if kernel.softmax.scale is not None:
        yield "SCALE", repr(kernel.softmax.scale), "factor of the raw score in base-2 units"


def forward_numbers(module: Module) -> Iterator[Number]:
    """The same, what the softmax knows of its maxima, and what the lse takes that leaves."""
    (kernel,) = module.kernels
    yield from score_numbers(kernel)
    softmax, unified = kernel.softmax, unified_of(kernel)
    if softmax.rescale == "lazy":
        what = "growth of the maximum, in base-2 units, that forces a rescale"
        yield "LAZY", repr(softmax.threshold), what
    if softmax.headroom:
        top = top_of(kernel.bound.p_dtype)
        above = "what exponents subtract lies so far above the maximum, in base-2 units"
        yield "ABOVE", repr(softmax.headroom - top), above
        limit = f"sum of p by which the maximum has grown by about {softmax.headroom:g}"
        yield "LIMIT", repr(2.0**top), limit
    if unified is not None:
        yield "PHI", repr(unified.phi), "the maximum that every row subtracts, in base-2 units"
        if unified.fallback:
            low = "least exponent that a row's largest may have, in base-2 units"
            yield "LOW", repr(unified.low), low
            yield "HIGH", repr(unified.high), "and the largest"
    if any(arg.tensor.name == "lse" for arg in (*module.outputs, *module.kept)):
        yield "LN2", repr(math.log(2)), "log(2): lse leaves in natural units"


def module_numbers(module: Module) -> Iterator[Number]:
    """All of a module whose kernels are in one file."""
    yield from forward_numbers(module)
    if module.backward is not None:
        yield from ROW_NUMBERS
    attention = module.variant.attention
    exprs = (attention.score, attention.mask, *([attention.softmax.sink] if attention.softmax.sink else []))
    if any(isinstance(node, Call) and node.function == "tanh" for expr in exprs for node in walk(expr)):
        yield "TWO_LOG2E", repr(2 * LOG2E), "exp(2 x) = exp2(2 log2(e) x)"
