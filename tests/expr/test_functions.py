"""Every row of the table of functions, against what NumPy and torch compute of these names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attnc.expr.evaluate import Env, evaluate, real
from attnc.expr.functions import REAL
from attnc.expr.nodes import Call, Dot
from attnc.expr.simplify import simplify

ARGUMENTS = np.array([-40.0, -3.5, -1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 3.5, 40.0, 200.0])


def defined(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Those of the arguments at which the function is a number."""
    has_pole = REAL[name].has_pole
    return np.array([x for x in ARGUMENTS if has_pole is None or not has_pole(x)])


def test_words_of_the_language_stay_the_same() -> None:
    """A spec may have used any other name for a tensor of its own."""
    assert {name for name, function in REAL.items() if function.is_reserved} == {"exp", "log", "sqrt", "tanh"}


@pytest.mark.parametrize("name", REAL)
def test_a_constant_is_what_a_reference_computes(name: str) -> None:
    x = defined(name)
    assert len(x) >= 7
    values = [REAL[name].value(number) for number in x]
    assert values == pytest.approx(list(real(name, x)), rel=1e-14)
    assert values == pytest.approx(getattr(torch, name)(torch.tensor(x)).tolist(), rel=1e-14)


@pytest.mark.parametrize("name", REAL)
def test_a_pole_is_where_float32_has_no_number(name: str) -> None:
    for x in ARGUMENTS:
        with np.errstate(all="ignore"):
            number = np.float32(real(name, np.asarray(x)))
        has_pole = REAL[name].has_pole
        assert np.isfinite(number) == (has_pole is None or not has_pole(x)), x


@pytest.mark.parametrize("name", REAL)
def test_values_lie_in_the_range(name: str) -> None:
    function, values = REAL[name], real(name, defined(name))
    assert (values >= function.low).all()
    assert (values <= function.high).all()


@pytest.mark.parametrize("name", REAL)
def test_the_range_is_as_narrow_as_can_be(name: str) -> None:
    """What is said to be bounded comes near its bounds, and what is not goes far."""
    function, wide = REAL[name], np.logspace(-30, 30, 4001)
    x = np.concatenate([-wide[::-1], wide])
    values = real(name, np.array([at for at in x if function.has_pole is None or not function.has_pole(at)]))
    for end, bound in ((values.min(), function.low), (values.max(), function.high)):
        assert abs(end) > 60 if math.isinf(bound) else end == pytest.approx(bound, abs=1e-5)
    assert function.is_bounded == bool(np.abs(values).max() <= 1)


@pytest.mark.parametrize("name", REAL)
def test_what_is_monotonous_rises(name: str) -> None:
    assert bool((np.diff(real(name, defined(name))) >= 0).all()) == REAL[name].is_monotonous


@pytest.mark.parametrize("name", [name for name in REAL if not REAL[name].is_monotonous])
def test_slopes_of_what_rises_and_falls_are_small(name: str) -> None:
    slope = evaluate(REAL[name].slope(Call(name, (Dot(),)), Dot()), Env(dot=ARGUMENTS))
    assert (np.abs(slope) <= 1).all()


@pytest.mark.parametrize("name", REAL)
def test_the_slope_is_that_of_a_secant(name: str) -> None:
    x = np.array([0.25, 0.5, 1.0, 2.0, 3.5])
    slope = simplify(REAL[name].slope(Call(name, (Dot(),)), Dot()))
    step = 1e-6
    secant = (real(name, x + step) - real(name, x - step)) / (2 * step)
    assert list(evaluate(slope, Env(dot=x))) == pytest.approx(list(secant), rel=1e-7, abs=1e-9)


#: Units in the last place that the CUDA C++ Programming Guide and the PTX ISA give for what targets call.
ULPS = {"exp": 2, "exp2": 2, "log": 1, "log2": 1, "erf": 2, "sin": 2, "cos": 2, "sqrt": 1}


def test_errors_are_those_of_the_sources() -> None:
    found = {name: (function.relative, function.absolute) for name, function in REAL.items()}
    assert found == {
        **{name: (ulps * 2.0**-23, 0.0) for name, ulps in ULPS.items()},
        "tanh": (0.0, 2.0**-21),  # two ulps each of exp2 and a quotient, and three roundings near 1
        "sigmoid": (2 * 2.0**-23 + 2.0**-24, 2.0**-126),  # a quotient, and the rounding of its divisor
    }
