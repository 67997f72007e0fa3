"""A resolved spec file: attentions and projections, each with its schedules.

A projection is a linear layer `y = x w^T + bias`, the other half of a transformer's decode step.

    projection NAME { param ..., input x: T[M, K], input w: T[N, K], input bias: T[N], output y: T[M, N]
                      y = dot(x, w) + bias[n] }

M is known when the function is called; N and K may be numbers, params or run-time sizes. Nothing else is
a projection, so that its three implementations (FlashDecoding++, arXiv 2311.01282) always apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from attnc.diagnostics import Diagnostic
from attnc.expr.nodes import Const, Expr
from attnc.model.attention import Attention, Param, ParamValue
from attnc.model.dtypes import DType
from attnc.model.schedule import Schedule
from attnc.model.tensors import Tensor
from attnc.source import Source, Span
from attnc.syntax import ast

Impl: TypeAlias = Literal["gemv", "flat", "conventional"]
#: The implementations, in the order in which they are best as M grows.
IMPLS: tuple[Impl, ...] = ("gemv", "flat", "conventional")
#: Those with kernels of their own, and hence with keys in a schedule.
KERNELS: tuple[Literal["gemv", "flat"], ...] = ("gemv", "flat")
#: The tensors of a projection, and the sizes of their axes.
SHAPES: Mapping[str, tuple[str, ...]] = {"x": ("M", "K"), "w": ("N", "K"), "bias": ("N",), "y": ("M", "N")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One `projection` block. sizes: M, N and K, each a Dim, a Const or a Param."""

    name: str
    params: tuple[Param, ...]
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, Expr]
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[name] for name in ("x", "w", "bias") if name in self.tensors)

    @property
    def has_bias(self) -> bool:
        return "bias" in self.tensors

    @property
    def dtype(self) -> DType:
        return DType(self.tensors["x"].dtype)

    def size(self, name: str) -> int | None:
        """Returns N or K of a variant where the spec fixes it; None for a run-time size."""
        found = self.sizes[name]
        return int(found.value) if isinstance(found, Const) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionVariant:
    """A projection at one point of its params; `name` is the module's name in generated/."""

    source: Source
    projection: Projection
    params: Mapping[str, ParamValue]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A resolved spec file. schedules: of its attentions; projection_schedules: of its projections; warnings:
    what `resolve` found that is not an error, in source order; trees: of its attentions, by name; written:
    where what the user wrote ends, if attnc has added schedules.
    """

    source: Source
    attentions: tuple[Attention, ...]
    schedules: tuple[Schedule, ...]
    projections: tuple[Projection, ...] = ()
    projection_schedules: tuple[Schedule, ...] = ()
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False, repr=False)
    trees: Mapping[str, ast.Attention] = field(default_factory=dict, compare=False, repr=False)
    written: int | None = field(default=None, compare=False, repr=False)

    def attention(self, name: str) -> Attention:
        """Returns the attention block of this name; KeyError if there is none."""
        for attention in self.attentions:
            if attention.name == name:
                return attention
        raise KeyError(name)

    def projection(self, name: str) -> Projection:
        """Returns the projection block of this name; KeyError if there is none."""
        for projection in self.projections:
            if projection.name == name:
                return projection
        raise KeyError(name)
