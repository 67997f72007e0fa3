"""Functions of other libraries that the language has no word for, as defs that compute them."""

from __future__ import annotations

from collections.abc import Mapping

#: The operands of max and min stand in an order with which derivatives are torch's where branches meet too:
#: of two equal ones the first counts (`expr.derive`).
_SOFTPLUS = "max(0, x) + log(1 + exp(min(x, -x)))"
#: Names (torch's, NumPy's, CUDA's or a paper's), parameters, and the body of a def.
_ROWS = (
    ("relu", "x", "max(0, x)"),
    ("relu2 relu_squared squared_relu", "x", "max(0, x) * max(0, x)"),
    ("relu6", "x", "min(6, max(0, x))"),
    ("leaky_relu", "x", "max(0.01 * x, x)"),
    ("elu celu", "x", "max(0, x) + exp(min(x, 0)) - 1"),
    ("selu", "x", "1.0507009874 * (max(0, x) + 1.6732632423 * (exp(min(x, 0)) - 1))"),
    ("gelu", "x", "0.5 * x * (1 + erf(x / sqrt(2)))"),
    (
        "gelu_tanh gelu_new gelu_fast gelu_pytorch_tanh",
        "x",
        "0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)))",
    ),
    ("quick_gelu", "x", "x * sigmoid(1.702 * x)"),
    ("silu swish", "x", "x * sigmoid(x)"),
    ("mish", "x", f"x * tanh({_SOFTPLUS})"),
    ("softplus", "x", _SOFTPLUS),
    ("logsigmoid log_sigmoid", "x", "-max(0, -x) - log(1 + exp(min(-x, x)))"),
    ("softsign", "x", "x / (1 + abs(x))"),
    ("tanhshrink", "x", "x - tanh(x)"),
    ("hardtanh", "x", "min(1, max(-1, x))"),
    ("hardsigmoid hard_sigmoid", "x", "min(3, max(-3, x)) / 6 + 0.5"),
    ("hardswish hard_swish", "x", "x * (min(3, max(-3, x)) / 6 + 0.5)"),
    ("hardshrink", "x", "where(abs(x) <= 0.5, 0, x)"),
    ("softshrink", "x", "x - clamp(x, -0.5, 0.5)"),
    ("threshold", "x, lo, y", "where(x <= lo, y, x)"),
    ("prelu", "x, w", "where(x > 0, x, w * x)"),
    ("expit logistic", "x", "sigmoid(x)"),
    ("logit", "x", "log(x / (1 - x))"),
    ("sign sgn", "x", "where(x > 0, 1, 0) - where(x < 0, 1, 0)"),
    ("heaviside", "x, y", "where(x > 0, 1, where(x == 0, y, 0))"),
    ("square sqr", "x", "x * x"),
    ("cube", "x", "x * x * x"),
    ("cbrt", "x", "where(x < 0, -1, 1) * exp2(log2(abs(x)) / 3)"),
    ("reciprocal rcp", "x", "1 / x"),
    ("rsqrt", "x", "1 / sqrt(x)"),
    ("ln", "x", "log(x)"),
    ("log1p", "x", "log(1 + x)"),
    ("log10", "x", "log(x) / log(10)"),
    ("expm1", "x", "exp(x) - 1"),
    ("exp10", "x", "exp2(3.3219280949 * x)"),
    ("sinh", "x", "(exp(x) - exp(-x)) / 2"),
    ("cosh", "x", "(exp(x) + exp(-x)) / 2"),
    ("asinh arcsinh", "x", "where(x < 0, -log(sqrt(x * x + 1) - x), log(x + sqrt(x * x + 1)))"),
    ("acosh arccosh", "x", "log(x + sqrt(x - 1) * sqrt(x + 1))"),
    ("atanh arctanh", "x", "0.5 * log((1 + x) / (1 - x))"),
    ("tan", "x", "sin(x) / cos(x)"),
    ("erfc", "x", "1 - erf(x)"),
    ("hypot", "x, y", "sqrt(x * x + y * y)"),
    ("logaddexp", "x, y", "where(x == y, 0.5 * (x + y) + log(2), max(x, y) + log(1 + exp(-abs(x - y))))"),
    ("lerp", "x, y, w", "x + w * (y - x)"),
    ("fma mad", "x, y, z", "x * y + z"),
    ("clamp_min", "x, lo", "max(x, lo)"),
    ("clamp_max", "x, hi", "min(x, hi)"),
    ("isnan", "x", "x != x"),
    ("isinf", "x", "abs(x) == inf"),
    ("isfinite", "x", "abs(x) < inf"),
    ("nan_to_num", "x", "where(x == x, clamp(x, -3.4028e38, 3.4028e38), 0)"),
    ("floor_divide floordiv", "x, y", "x // y"),
    ("cdiv ceil_div ceildiv", "x, y", "-(-x // y)"),
    ("mod remainder", "x, y", "x % y"),
    ("fmod", "x, y", "where(x < 0, -(-x % abs(y)), x % abs(y))"),
    ("xor logical_xor", "x, y", "x != y"),
    ("logical_and", "x, y", "x and y"),
    ("logical_or", "x, y", "x or y"),
    ("logical_not", "x", "not x"),
    ("eq equal", "x, y", "x == y"),
    ("ne not_equal", "x, y", "x != y"),
    ("lt less", "x, y", "x < y"),
    ("le less_equal", "x, y", "x <= y"),
    ("gt greater", "x, y", "x > y"),
    ("ge greater_equal", "x, y", "x >= y"),
)
#: The def of each function, in a line.
DEFS: Mapping[str, str] = {
    name: f"def {name}({parameters}) = {body}" for names, parameters, body in _ROWS for name in names.split()
}
