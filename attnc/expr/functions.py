"""The functions that expressions call: a row for each function of a real number, with what is known of it.

Other modules ask a row and name no function. What judges kernels has definitions of its own, or both would be
wrong together: `expr.evaluate` (NumPy's functions of these names), `reference_gradients` (torch's). A target
spells a function by its name, or as its table of exceptions says (`target.printer.Syntax.functions`).

Errors are relative and absolute, on any target, for an exact argument; a function within n ulps has a
relative error of at most n 2^-23. Sources: CUDA C++ Programming Guide, "Mathematical Functions"; PTX ISA,
"Floating-Point Instructions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from attnc.expr.construct import div, mul, neg, sub
from attnc.expr.nodes import Call, Const, Expr

_ONE = Const(1.0)
#: exp of more leaves float32.
_LARGEST_EXPONENT = 88.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFunction:
    """A function of one number; its result is a float.

    value: of a constant; raises ValueError or OverflowError where it is no finite number
    slope: d f(x) / d x, given f(x) and x; in terms of f(x) where that saves an evaluation
    low, high: between which its values lie
    is_monotonous: whether it rises or falls everywhere; where it does neither, its slope is between -1 and 1
    has_pole: whether it is no finite number at an argument; None: it always is one
    relative, absolute: errors of what targets compute
    short: what a kernel calls its value where the derivative needs it again ("": it does not)
    is_reserved: whether its name is a word of the language. Those of functions that came later may be used
    for something else by specs that are older.
    """

    name: str
    value: Callable[[float], float]
    slope: Callable[[Expr, Expr], Expr]
    low: float = -math.inf
    high: float = math.inf
    is_monotonous: bool = True
    has_pole: Callable[[float], bool] | None = None
    relative: float = 0.0
    absolute: float = 0.0
    short: str = ""
    is_reserved: bool = False

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)


def _bell(x: Expr) -> Expr:
    return Call("exp", (neg(mul(x, x)),))


_ROWS = (
    # exp, exp2: ex2.approx of the GPU, 2^-22 (Triton's tl.exp and tl.exp2 are that instruction), and exp2f of
    # CUDA, 2 ulps; expf has 1 ulp. What exp loses with the product x log2(e) grows with x
    # (`verify.running_error`).
    RealFunction(
        name="exp",
        value=math.exp,
        slope=lambda f, x: f,
        low=0.0,
        has_pole=lambda x: x > _LARGEST_EXPONENT,
        relative=2.0**-22,
        short="e",
        is_reserved=True,
    ),
    RealFunction(
        name="exp2",
        value=math.exp2,
        slope=lambda f, x: mul(f, Const(math.log(2))),
        low=0.0,
        has_pole=lambda x: x > _LARGEST_EXPONENT / math.log(2),
        relative=2.0**-22,
        short="power",
    ),
    # log, log2, erf: logf and log2f of libdevice, which both targets call, 1 ulp; erff 2 ulps.
    RealFunction(
        name="log",
        value=math.log,
        slope=lambda f, x: div(_ONE, x),
        has_pole=lambda x: x <= 0,
        relative=2.0**-23,
        short="ln",
        is_reserved=True,
    ),
    RealFunction(
        name="log2",
        value=math.log2,
        slope=lambda f, x: div(Const(math.log2(math.e)), x),
        has_pole=lambda x: x <= 0,
        relative=2.0**-23,
        short="log_2",
    ),
    # tanh(x) = 1 - 2 / (exp2(2 x log2 e) + 1): three roundings near 1 and two ulps each of exp2 and division.
    # On Hopper also a polynomial, within 2^-21.5, and three roundings near 1/3 (`plan.sm90.softcap`).
    RealFunction(
        name="tanh",
        value=math.tanh,
        slope=lambda f, x: sub(_ONE, mul(f, f)),
        low=-1.0,
        high=1.0,
        absolute=2.0**-21,
        short="t",
        is_reserved=True,
    ),
    # sigmoid: its division, 2 ulps (div.full of Triton, __fdividef of CUDA), and one rounding of the divisor;
    # the error of exp comes on top. A divisor beyond 2^126 may give 0.
    RealFunction(
        name="sigmoid",
        value=_sigmoid,
        slope=lambda f, x: mul(f, sub(_ONE, f)),
        low=0.0,
        high=1.0,
        relative=2.0**-22 + 2.0**-24,
        absolute=2.0**-126,
        short="sig",
    ),
    RealFunction(
        name="erf",
        value=math.erf,
        slope=lambda f, x: mul(Const(2 / math.sqrt(math.pi)), _bell(x)),
        low=-1.0,
        high=1.0,
        relative=2.0**-22,
    ),
    # sin, cos: sinf and cosf of libdevice, which both targets call, 2 ulps of the result wherever it is.
    RealFunction(
        name="sin",
        value=math.sin,
        slope=lambda f, x: Call("cos", (x,)),
        low=-1.0,
        high=1.0,
        is_monotonous=False,
        has_pole=math.isinf,
        relative=2.0**-22,
    ),
    RealFunction(
        name="cos",
        value=math.cos,
        slope=lambda f, x: neg(Call("sin", (x,))),
        low=-1.0,
        high=1.0,
        is_monotonous=False,
        has_pole=math.isinf,
        relative=2.0**-22,
    ),
    # sqrt: sqrt.approx, 2^-23 (Triton); sqrtf of CUDA is rounded right.
    RealFunction(
        name="sqrt",
        value=math.sqrt,
        slope=lambda f, x: div(Const(0.5), f),
        low=0.0,
        has_pole=lambda x: x < 0,
        relative=2.0**-23,
        short="root",
        is_reserved=True,
    ),
)

#: Functions of one real number, by name.
REAL: Mapping[str, RealFunction] = MappingProxyType({row.name: row for row in _ROWS})
#: Intrinsics and their arity. Everything else is a `def` of the prelude, or `clamp`, which is sugar.
FUNCTIONS: Mapping[str, int] = MappingProxyType(
    {"abs": 1, "min": 2, "max": 2, **dict.fromkeys(REAL, 1), "where": 3, "bit": 2}
)
