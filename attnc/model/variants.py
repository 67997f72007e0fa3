"""Attention or projection -> Variants: one for each point of the params, with every size, constant and type
filled in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from math import inf, prod

from attnc.diagnostics import LIFT, DiagnosticError, Label, Reporter, error
from attnc.effort import at_most, memo_by_object
from attnc.expr.construct import MAX_FLOAT, number
from attnc.expr.derive import derive
from attnc.expr.nodes import MAX_INTEGER, Binary, Const, Expr, children, walk
from attnc.expr.nodes import Param as ParamNode
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, ParamValue, Variant
from attnc.model.dtypes import DType
from attnc.model.elaborate import report_limit
from attnc.model.program import Program, Projection, ProjectionVariant
from attnc.model.tensors import Paged, Tensor, is_static
from attnc.source import Span

MAX_VARIANTS = 1024
#: Characters. With a label and what is said of a kernel it is the name of a file, of 255 at most.
MAX_VARIANT_NAME = 150
#: What a factor, or the reciprocal of a divisor, stays below, so that it may be multiplied by log2(e).
MAX_FACTOR = 2.0**127


def variants(program: Program, attention: Attention, most: int | None = None) -> tuple[Variant, ...]:
    """Returns all variants, or at most so many of them, in the order of the params' choices, the default
    first.

    Raises DiagnosticError when there are more than MAX_VARIANTS (counted, not expanded), and for sizes and
    divisors that turn out to be zero or negative.
    """
    _check_count("attention", attention, program)
    report = Reporter()
    made = []
    known = _known_fixed(attention)
    for point in islice(product(*(param.choices for param in attention.params)), most):
        params = {param.name: value for param, value in zip(attention.params, point, strict=True)}
        with report_limit(f"variant '{variant_name(params)}'", attention.span or program.source.span(0, 0)):
            if point not in known:
                known[point] = _fix(attention, params)
            fixed = known[point]
            element_param = _find_element_param(attention, params)
            shared = {param: value for param, value in params.items() if param != element_param}
            variant = Variant(
                source=program.source,
                attention=fixed,
                params=params,
                name=variant_name(params),
                kernels=variant_name(shared),
                element_param=element_param,
            )
            made.append(variant)
            if not report.errors:
                _check(variant, report)
    report.raise_errors()
    return tuple(made)


@memo_by_object
def _known_fixed(attention: Attention) -> dict[Hashable, Attention]:
    """Returns where an attention is kept by the values of its params: every schedule has the same variants,
    and what is found of one for a target holds for all.
    """
    return {}


def projection_variants(program: Program, projection: Projection) -> tuple[ProjectionVariant, ...]:
    """Makes the variants of a projection, one for each point of its params."""
    _check_count("projection", projection, program)
    made = []
    for point in product(*(param.choices for param in projection.params)):
        params = {param.name: value for param, value in zip(projection.params, point, strict=True)}
        fixed, name = _fix_projection(projection, params), variant_name(params)
        made.append(ProjectionVariant(source=program.source, projection=fixed, params=params, name=name))
    return tuple(made)


def count_variants(block: Attention | Projection) -> int:
    """Returns how many variants the params make."""
    return prod(len(param.choices) for param in block.params)


def _check_count(kind: str, block: Attention | Projection, program: Program) -> None:
    count = count_variants(block)
    if count > at_most(MAX_VARIANTS):
        shown = str(count) if count < 10**9 else "more than 10^9"  # huge integers cannot be printed
        sizes = " x ".join(f"{len(param.choices)} {param.name}" for param in block.params[:8])
        raise DiagnosticError(
            [
                error(
                    "E0508",
                    f"{kind} '{block.name}' has {shown} variants; the limit is {MAX_VARIANTS}",
                    block.span or program.source.span(0, 0),
                    "each is a kernel of its own",
                    notes=(sizes + " x ..." * (len(block.params) > 8),),
                    hints=(LIFT,),
                )
            ]
        )


def variant_name(params: Mapping[str, ParamValue]) -> str:
    """Returns `bf16_d128`, `f16_w128_d64`: types by their names, other params as lower-case name and value;
    "default" for none.
    """
    parts = [
        str(value) if isinstance(value, DType) else f"{name.lower()}{_spell(value)}"
        for name, value in params.items()
    ]
    return "_".join(parts) or "default"


def _find_element_param(attention: Attention, params: Mapping[str, ParamValue]) -> str:
    param = attention.q.dtype
    if isinstance(param, DType):
        return ""
    return param if DType(str(params[param])).bytes == 2 else ""


def add_label(variant: Variant, label: str) -> Variant:
    """Returns the variant under one of several schedules: `d128_prefill`."""
    if not label:
        return variant
    name, kernels = (
        label if name == "default" else f"{name}_{label}" for name in (variant.name, variant.kernels)
    )
    return replace(variant, name=name, kernels=kernels)


def own_kernels(variant: Variant) -> Variant:
    """Returns the variant with kernels of its own, which no other element type shares."""
    return replace(variant, element_param="", kernels=variant.name)


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
        storage = tensor.storage
        if isinstance(storage, Paged) and storage.param:
            storage = replace(storage, page=int(params[storage.param]), param="")
        return replace(tensor, dtype=dtype, shape=tuple(map(fix, tensor.shape)), storage=storage)

    return replace(attention.rewrite(fix, fix_tensor), params=())


def _fix_projection(projection: Projection, params: Mapping[str, ParamValue]) -> Projection:
    def fix(size: Expr) -> Expr:
        return Const(int(str(params[size.name]))) if isinstance(size, ParamNode) else size

    def fix_tensor(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype if isinstance(tensor.dtype, DType) else DType(str(params[tensor.dtype]))
        return replace(tensor, dtype=dtype, shape=tuple(map(fix, tensor.shape)))

    return replace(
        projection,
        params=(),
        tensors={name: fix_tensor(tensor) for name, tensor in projection.tensors.items()},
        sizes={name: fix(size) for name, size in projection.sizes.items()},
    )


def _check(variant: Variant, report: Reporter) -> None:
    attention, note = variant.attention, f"in variant '{variant.name}'"
    place = attention.span or variant.source.span(0, 0)
    if len(variant.name) > MAX_VARIANT_NAME:
        label = f"the limit is {MAX_VARIANT_NAME}: files are called so"
        hints = ("give params shorter names",)
        report.error("E0504", f"variant name of {len(variant.name)} characters", place, label, hints=hints)
    for tensor in (*attention.inputs, *attention.outputs):
        for size in tensor.shape:
            if is_static(size) and not (isinstance(size, Const) and 1 <= size.value < 2**63):
                value = size.value if isinstance(size, Const) else "not a number"
                report.error("E0308", f"an axis of '{tensor.name}' is {value}", size.span or place, note)
    for expr in _expressions(attention):
        for node, at in _with_places(expr, place):
            _check_arithmetic(node, at, note, report)
    if attention.grads and not report.errors:
        _check_slopes(attention, attention.score.span or place, note, report)
    storage = attention.v.storage
    whole, part = number(attention.k.shape[-1]) or 0, number(attention.v.shape[-1]) or 0
    rest = attention.k_rest
    behind = 0 if rest is None else number(rest.extents[-1]) or 0
    if whole + behind != (columns := number(attention.q.shape[-1])):
        others = f"k has {whole}" if rest is None else f"k and {rest.tensor} have {whole} and {behind}"
        span = rest.span if rest is not None else attention.k.span
        report.error("E0311", f"q has {columns} columns, {others}", span or place, note)
    reached = behind if attention.joins_values else 0
    if storage.is_part and part > whole + reached:
        keys = f"k and {rest.tensor} have {whole} and {reached}" if rest and reached else f"has {whole}"
        message = f"v has {part} columns, {keys if reached else f'the k that it is a prefix of {keys}'}"
        related = () if attention.k.span is None else (Label(attention.k.span, f"{whole} columns"),)
        report.error("E0316", message, storage.span or place, note, related=related)


def _with_places(expr: Expr, place: Span) -> Iterator[tuple[Expr, Span]]:
    """Yields every node with its place: what was merged from several has that of the expression around it."""
    place = expr.span or place
    yield expr, place
    for child in children(expr):
        yield from _with_places(child, place)


def _check_arithmetic(node: Expr, place: Span, note: str, report: Reporter) -> None:
    if isinstance(node, Binary) and node.op in ("/", "//", "%") and number(node.right) == 0:
        report.error("E0320", "division by zero", place, note)
    value = number(node)
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        report.error("E0507", "integer beyond 62 bits", place, note)
    elif _is_no_number(node):
        report.error(
            "E0507", "constant that is no number", place, note, hints=("inf - inf and 0 * inf are NaN",)
        )
    elif what := _beyond_float32(node):
        report.error("E0507", f"{what} beyond float32", place, note, notes=(_COMPUTED,))


_COMPUTED = "kernels compute floats in float32, where the largest is 3.4e38"


def _is_no_number(node: Expr) -> bool:
    """Returns whether the operands are constants that could not be folded since the result is NaN, like inf -
    inf.
    """
    if not isinstance(node, Binary):
        return False
    left, right = number(node.left), number(node.right)
    return left is not None and right is not None and inf in (abs(left), abs(right))


def _beyond_float32(node: Expr) -> str:
    """Returns the part of the node that leaves float32, "" if none does. A factor that is too large would
    make NaN of 0.
    """
    value = number(node)
    if isinstance(value, float) and MAX_FLOAT < abs(value) < inf:
        return "constant"
    if isinstance(node, Binary) and node.type == "float":
        left, right = (abs(number(side) or 0.0) for side in (node.left, node.right))
        if node.op == "*" and MAX_FACTOR <= max(left, right) <= MAX_FLOAT:
            return "factor"
        if node.op == "/" and 0 < right <= 1 / MAX_FACTOR:
            return "reciprocal"
    return ""


def _check_slopes(attention: Attention, place: Span, note: str, report: Reporter) -> None:
    derivatives = [derive(attention.score)]
    derivatives += [] if attention.epilogue is None else [derive(attention.epilogue)]
    slopes = [derivative.dot for derivative in derivatives]
    for derivative in derivatives:
        slopes += (slope for load, slope in derivative.loads if load.tensor in attention.grads)
    for what in filter(None, (_beyond_float32(node) for slope in slopes for node in walk(slope))):
        report.error("E0507", f"derivative with a {what} beyond float32", place, note, notes=(_COMPUTED,))
        break


def _expressions(attention: Attention) -> Iterator[Expr]:
    rest = () if attention.k_rest is None else (attention.k_rest,)
    yield from (*attention.expressions, *attention.lengths.values(), *rest)
