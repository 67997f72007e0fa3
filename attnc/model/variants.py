"""Attention -> Variants: one for each point of the params, with every size, constant and element type filled
in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import TypeAlias

from attnc.diagnostics import DiagnosticError, error
from attnc.expr.nodes import Binary, Const, Expr, walk
from attnc.expr.nodes import Param as ParamNode
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Program, Variant
from attnc.model.report import Report
from attnc.model.tensors import DType, Prefix, Tensor

MAX_VARIANTS = 256

ParamValue: TypeAlias = DType | bool | int | float


def variants(program: Program, attention: Attention) -> tuple[Variant, ...]:
    """All variants, in the order of the params' choices, the default first.

    Raises DiagnosticError when there are more than MAX_VARIANTS (counted, not expanded), and for sizes and
    divisors that turn out to be zero or negative.
    """
    count = prod(len(param.choices) for param in attention.params)
    if count > MAX_VARIANTS:
        span = attention.span or program.source.span(0, 0)
        message = f"attention '{attention.name}' has {count} variants; the limit is {MAX_VARIANTS}"
        sizes = " x ".join(f"{len(param.choices)} {param.name}" for param in attention.params)
        raise DiagnosticError(
            [error("E0508", message, span, "each is a kernel of its own", notes=(f"{sizes}",))]
        )
    report = Report()
    made = []
    for point in product(*(param.choices for param in attention.params)):
        params = {param.name: value for param, value in zip(attention.params, point, strict=True)}
        variant = Variant(
            source=program.source, attention=_fix(attention, params), params=params, name=variant_name(params)
        )
        made.append(variant)
        if not report.errors:
            _check(variant, report)
    report.raise_errors()
    return tuple(made)


def variant_name(params: Mapping[str, ParamValue]) -> str:
    """`bf16_d128`, `f16_w128_d64`: types by their names, other params as lower-case name and value; "default"
    for none.
    """
    parts = [
        str(value) if isinstance(value, DType) else f"{name.lower()}{_spell(value)}"
        for name, value in params.items()
    ]
    return "_".join(parts) or "default"


def _spell(value: ParamValue) -> str:
    if isinstance(value, bool):
        return "_true" if value else "_false"
    return str(value).replace("-", "m").replace(".", "p").replace("+", "")


def _fix(attention: Attention, params: Mapping[str, ParamValue]) -> Attention:
    mapping: dict[Expr, Expr] = {}
    for name, value in params.items():
        if not isinstance(value, DType):
            mapping[ParamNode(name, Const(value).type)] = Const(value)
            mapping[ParamNode(name, "float")] = Const(float(value))

    def fix(expr: Expr) -> Expr:
        return substitute(expr, mapping)

    def fix_tensor(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype if isinstance(tensor.dtype, DType) else DType(str(params[tensor.dtype]))
        return replace(tensor, dtype=dtype, shape=tuple(map(fix, tensor.shape)))

    softmax = attention.softmax
    return replace(
        attention,
        params=(),
        inputs=tuple(map(fix_tensor, attention.inputs)),
        outputs=tuple(map(fix_tensor, attention.outputs)),
        lengths={name: fix(length) for name, length in attention.lengths.items()},
        score=fix(attention.score),
        mask=fix(attention.mask),
        softmax=replace(
            softmax,
            sink=softmax.sink and fix(softmax.sink),
            dropout=softmax.dropout and fix(softmax.dropout),
            seed=softmax.seed and fix(softmax.seed),
        ),
    )


def _check(variant: Variant, report: Report) -> None:
    """What only numbers show: sizes below 1, division by zero, a prefix that is wider than the whole."""
    attention, note = variant.attention, f"in variant '{variant.name}'"
    place = attention.span or variant.source.span(0, 0)
    for tensor in (*attention.inputs, *attention.outputs):
        for size in tensor.shape:
            if isinstance(size, Const) and size.value < 1:
                report.error("E0308", f"an axis of '{tensor.name}' is {size.value}", size.span or place, note)
    for expr in _expressions(attention):
        for node in walk(expr):
            if (
                isinstance(node, Binary)
                and node.op in ("/", "//", "%")
                and node.right in (Const(0), Const(0.0))
            ):
                report.error("E0320", "division by zero", node.span or place, note)
    storage = attention.v.storage
    whole, part = attention.k.shape[-1], attention.v.shape[-1]
    if (
        isinstance(storage, Prefix)
        and isinstance(whole, Const)
        and isinstance(part, Const)
        and part.value > whole.value
    ):
        message = f"v has {part.value} columns, the k that it is a prefix of has {whole.value}"
        report.error("E0316", message, storage.span or place, note)


def _expressions(attention: Attention) -> Iterator[Expr]:
    softmax = attention.softmax
    yield from (attention.score, attention.mask, *attention.lengths.values())
    yield from (expr for expr in (softmax.sink, softmax.dropout, softmax.seed) if expr is not None)
