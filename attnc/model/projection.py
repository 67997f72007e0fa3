"""A projection: a linear layer `y = x w^T + bias`, the other half of a transformer's decode step.

    projection NAME { param ..., input x: T[M, K], input w: T[N, K], input bias: T[N], output y: T[M, N]
                      y = dot(x, w) + bias[n] }

M is known when the function is called; N and K may be numbers, params or run-time sizes. Nothing else is a
projection, so that its three implementations (FlashDecoding++, arXiv 2311.01282) always apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from attnc.diagnostics import DiagnosticError, error
from attnc.expr.nodes import Const, Expr
from attnc.expr.nodes import Param as ParamNode
from attnc.model.attention import Param, Program
from attnc.model.tensors import DType, Tensor
from attnc.model.variants import MAX_VARIANTS, ParamValue, variant_name
from attnc.source import Source, Span

#: The tensors of a projection, and the sizes of their axes.
SHAPES: Mapping[str, tuple[str, ...]] = {"x": ("M", "K"), "w": ("N", "K"), "bias": ("N",), "y": ("M", "N")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One `projection` block. sizes: M, N and K, each a Dim, a Const or a Param; equation: its line."""

    name: str
    params: tuple[Param, ...]
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, Expr]
    equation: Span | None = field(default=None, compare=False, repr=False)
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[name] for name in ("x", "w", "bias") if name in self.tensors)

    @property
    def has_bias(self) -> bool:
        return "bias" in self.tensors

    @property
    def dtype(self) -> DType:
        """The element type, of a variant."""
        return DType(self.tensors["x"].dtype)

    def size(self, name: str) -> int | None:
        """N or K of a variant where the spec fixes it; None for a run-time size."""
        found = self.sizes[name]
        return int(found.value) if isinstance(found, Const) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionVariant:
    """A projection at one point of its params; `name` is the module's name in generated/."""

    source: Source
    projection: Projection
    params: Mapping[str, ParamValue]
    name: str


def projection_variants(program: Program, projection: Projection) -> tuple[ProjectionVariant, ...]:
    """All variants, the default first. Raises DiagnosticError (E0508) when there are too many."""
    if prod(len(param.choices) for param in projection.params) > MAX_VARIANTS:
        place = projection.span or program.source.span(0, 0)
        message = f"projection '{projection.name}' has more than {MAX_VARIANTS} variants"
        raise DiagnosticError([error("E0508", message, place, "each is a module of its own")])
    made = []
    for point in product(*(param.choices for param in projection.params)):
        params = {param.name: value for param, value in zip(projection.params, point, strict=True)}
        fixed = _fix(projection, params)
        name = variant_name(params)
        made.append(ProjectionVariant(source=program.source, projection=fixed, params=params, name=name))
    return tuple(made)


def _fix(projection: Projection, params: Mapping[str, ParamValue]) -> Projection:
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
