"""What functions and element types are called in Python, PyTorch and CUDA, and what is written here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnc.diagnostics import did_you_mean

#: Functions, and what to write in their place.
_FUNCTIONS: Mapping[str, str] = {
    "pow": "write x * x for a square, exp2(y * log2(x)) for x to the power of y",
    "relu": "write max(x, 0)",
    "rsqrt": "write 1 / sqrt(x)",
    "log1p": "write log(1 + x)",
    "expm1": "write exp(x) - 1",
    "log10": "write log(x) / log(10)",
    **dict.fromkeys(("maximum", "fmax"), "write 'max'"),
    **dict.fromkeys(("minimum", "fmin"), "write 'min'"),
    **dict.fromkeys(("fabs", "absolute"), "write 'abs'"),
    **dict.fromkeys(("clip", "clamp_"), "write clamp(x, lo, hi)"),
    **dict.fromkeys(("silu", "swish"), "write x * sigmoid(x)"),
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "int"),
        "no float becomes an integer: divide integers with '//', or compare with each threshold",
    ),
    "float": "an integer becomes a float where one is needed",
    "len": "lengths are sizes, such as N, and inputs, such as kv_len[b]",
    **dict.fromkeys(("sum", "mean", "cumsum"), "a score is of one query and one key: pass sums as an input"),
    **dict.fromkeys(("logical_and", "logical_or"), "write 'and' and 'or' between conditions"),
    **dict.fromkeys(("rand", "random", "dropout"), "write softmax(dropout = p, seed = seed)"),
    **dict.fromkeys(("sin", "cos"), "pass a table of its values as an input"),
}
#: Element types, and what they are called elsewhere.
_TYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "f16": "half float16 fp16",
    "f32": "float float32 fp32 single",
    "i32": "int int32 s32 u32",
    "i64": "long int64 s64",
    "bool": "bool_ boolean i1 b1",
}
_TYPE_OF = {theirs: ours for ours, names in _TYPES.items() for theirs in names.split()}


def called_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the hint about a function that there is not: what is written for it, or what is close."""
    return (_FUNCTIONS[name],) if name in _FUNCTIONS else did_you_mean(name, known)


def type_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the hint about an element type that there is not."""
    return (f"write '{_TYPE_OF[name]}'",) if name in _TYPE_OF else did_you_mean(name, known)
