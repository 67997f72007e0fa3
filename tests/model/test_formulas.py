"""Functions that the language has no word for: the def that a message proposes computes them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.expr.derive import derive
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr
from attnc.model.formulas import DEFS
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

SPEC = """\
attention a {{
  input q: f32[B, M, H, 64]
  input k, v: f32[B, N, H, 64]
  score = {}
  normalize = softmax
  output o: f32[B, M, H, 64]
}}
"""
#: Numbers of every kind; the function decides which it takes.
X = np.array([-30.0, -3.5, -2.0, -1.0, -0.75, -0.1, 0.0, 0.25, 0.5, 0.9, 1.0, 1.5, 3.0, 7.0, 40.0])
Y = np.roll(X, 4)
#: What a name means where neither torch nor NumPy has it.
_MEANING: dict[str, Any] = {
    "relu2": lambda x: torch.relu(x) ** 2,
    "relu_squared": lambda x: torch.relu(x) ** 2,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swish": torch.nn.functional.silu,
    "hard_sigmoid": torch.nn.functional.hardsigmoid,
    "hard_swish": torch.nn.functional.hardswish,
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "threshold": lambda x, lo, y: torch.where(x <= lo, y, x),  # which torch takes as numbers
    "prelu": lambda x, w: torch.where(x > 0, x, w * x),
    "expit": torch.special.expit,
    "logistic": torch.special.expit,
    "sqr": torch.square,
    "cube": lambda x: x**3,
    "cbrt": lambda x: torch.from_numpy(np.cbrt(x.numpy())),
    "rcp": torch.reciprocal,
    "ln": torch.log,
    "exp10": lambda x: 10**x,
    "fma": lambda x, y, z: x * y + z,
    "mad": lambda x, y, z: x * y + z,
    "clamp_min": torch.maximum,
    "clamp_max": torch.minimum,
    "floordiv": torch.floor_divide,
    "cdiv": lambda x, y: -(-x // y),
    "ceil_div": lambda x, y: -(-x // y),
    "ceildiv": lambda x, y: -(-x // y),
    "mod": torch.remainder,
    "fmod": torch.fmod,
    "xor": torch.logical_xor,
    "equal": torch.eq,
    "nan_to_num": lambda x: torch.nan_to_num(x),
}
_MEANING |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), _MEANING["gelu_tanh"])
_OF_INTEGERS = {"floor_divide", "floordiv", "cdiv", "ceil_div", "ceildiv", "mod", "fmod", "remainder"}
_OF_CONDITIONS = {"xor", "logical_xor", "logical_and", "logical_or", "logical_not"}


def _meaning(name: str) -> Any:
    for place in (torch.nn.functional, torch):
        if name not in _MEANING and hasattr(place, name):
            return getattr(place, name)
    return _MEANING[name]


def _score(text: str) -> Expr:
    program = resolve(parse(Source("spec.attn", text)), prelude())
    (variant,) = variants(program, program.attentions[0])
    return variant.attention.score


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DEFS)
def test_a_proposed_def_computes_the_function(name: str) -> None:
    """As typed: the line of the message above the spec that it is about."""
    count = DEFS[name].partition(")")[0].count(",") + 1
    of_integers, of_conditions = name in _OF_INTEGERS, name in _OF_CONDITIONS
    places = ("kv_idx - 7", "q_idx + 1", "b") if of_integers else ("dot(q, k)", "q_idx / 4", "b / 2")
    if of_conditions:
        places = ("kv_idx < 4", "kv_idx % 2 == 0", "b == 0")
    call = f"{name}({', '.join(places[:count])})"
    wanted = f"where({call}, 1.0, 0.0)" if of_conditions or name in _CONDITIONS else f"1.0 * {call}"
    with pytest.raises(DiagnosticError) as refusal:
        _score(SPEC.format(wanted))
    (hint,) = refusal.value.diagnostics[0].hints
    line = re.fullmatch(r"define it, in a line outside of the attention: (.*)", hint)
    assert line is not None
    score = _score(f"{line[1]}\n{SPEC.format(wanted)}")
    keys, queries = np.arange(len(X)), (Y * 4).astype(np.int64)
    with np.errstate(all="ignore"):
        indices = {"kv_idx": keys, "q_idx": queries, "b": 3 - keys % 7, "h": keys}
        found = evaluate(score, Env(indices=indices, dims={"M": 64, "N": 64}, dot=X))
    arguments: list[Any] = [X, queries / 4, indices["b"] / 2]
    if of_integers:
        arguments = [keys - 7, queries + 1, indices["b"]]
    if of_conditions:
        arguments = [keys < 4, keys % 2 == 0, indices["b"] == 0]
    tensors = [torch.from_numpy(np.asarray(argument)) for argument in arguments[:count]]
    right = _meaning(name)(*tensors).double().numpy()
    of_zero = (queries + 1 == 0) if of_integers else np.zeros(len(X), bool)
    assert np.allclose(found[~of_zero], right[~of_zero], rtol=1e-6, atol=1e-7, equal_nan=True)


_CONDITIONS = {
    *("isnan", "isinf", "isfinite", "eq", "equal", "ne", "not_equal", "lt", "less", "le", "less_equal"),
    *("gt", "greater", "ge", "greater_equal"),
}


#: Operands besides the first, and those that torch takes as numbers.
_OTHERS = (0.5, 0.25)
_TAKEN_AS_NUMBERS: dict[str, Any] = {"clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max}
#: Those without a slope: of integers, conditions, what torch does not differentiate, and NumPy's.
_WITHOUT_SLOPE = {*_OF_INTEGERS, *_OF_CONDITIONS, *_CONDITIONS, "heaviside", "sgn", "cbrt"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(DEFS.keys() - _WITHOUT_SLOPE))
def test_a_proposed_def_has_the_slope_of_the_function(name: str) -> None:
    """Where branches meet, and beside it too, as torch.autograd has it."""
    others = _OTHERS[: DEFS[name].partition(")")[0].count(",")]
    call = f"{name}({', '.join(('dot(q, k)', *map(str, others)))})"
    score = _score(f"{DEFS[name]}\n{SPEC.format(f'1.0 * {call}')}")
    kinks = [-6.0, -3.0, -0.5, *(math.nextafter(3, end) for end in (0, 6)), 6.0, 19.0, 21.0, 200.0]
    x = torch.tensor([*X, *kinks], dtype=torch.float64, requires_grad=True)
    if name in _TAKEN_AS_NUMBERS:
        value = _TAKEN_AS_NUMBERS[name](x, *others)
    else:
        value = _meaning(name)(x, *(torch.full_like(x, other) for other in others))
    (right,) = torch.autograd.grad(value.sum(), [x])
    with np.errstate(all="ignore"):
        found = evaluate(derive(score).dot, Env(indices={}, dims={}, dot=x.detach().numpy()))
    known = value.isfinite()
    found = np.broadcast_to(found, known.shape)[known]
    assert np.allclose(found, right[known].numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "x", "right"),
    [
        ("logaddexp(dot(q, k), -inf)", [-math.inf, 1.0], [-math.inf, 1.0]),
        ("softplus(dot(q, k))", [-math.inf, math.inf], [0.0, math.inf]),
        ("acosh(dot(q, k))", [-1e30, -5.0, 1e30], [math.nan, math.nan, math.acosh(1e30)]),
        ("heaviside(dot(q, k), 0.5)", [math.nan, 0.0], [0.0, 0.5]),
    ],
)
def test_a_proposed_def_takes_any_number(call: str, x: list[float], right: list[float]) -> None:
    score = _score(f"{DEFS[call.partition('(')[0]]}\n{SPEC.format(f'1.0 * {call}')}")
    with np.errstate(all="ignore"):
        found = evaluate(score, Env(indices={}, dims={}, dot=np.array(x)))
    assert np.allclose(found, right, equal_nan=True)
