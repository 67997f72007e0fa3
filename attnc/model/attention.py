"""An attention: the mathematical result and the call signature, with every name resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from attnc.expr.nodes import Const, Dim, Expr, Load, uses
from attnc.model.columns import reads_columns
from attnc.model.dtypes import DType
from attnc.model.tensors import Prefix, Role, Tensor, group_size, size_loads
from attnc.source import Source, Span

ParamValue: TypeAlias = DType | bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """`param NAME in {choices}`: the first choice is the default."""

    name: str
    choices: tuple[ParamValue, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


#: What becomes of the scores of a row, by its name after `normalize =`.
Form: TypeAlias = Literal["softmax", "softpick", "stick_breaking", "none"]
#: What softpick adds to its denominator (arXiv 2504.20966, equation 4).
EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """`normalize = softmax(...)`, or another `form`, which has no arguments.

    sink: f32 logit that joins the denominator only (gpt-oss); dropout: drop probability p with its i64
    `seed`; keep-mask of (seed, b, h, q_idx, kv_idx), see `reference.keep`; first_head: added to h there.
    v_scale: what v is to be multiplied by, the same for all keys of a row, or (`scales_keys`) not, or
    (`scales_columns`) different from column to column.
    """

    sink: Expr | None = None
    dropout: Expr | None = None
    seed: Expr | None = None
    first_head: Expr | None = None
    v_scale: Expr | None = None
    form: Form = "softmax"
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        optional = (self.sink, self.dropout, self.seed, self.first_head, self.v_scale)
        return tuple(expr for expr in optional if expr is not None)

    @property
    def scales_keys(self) -> bool:
        return self.v_scale is not None and "kv_idx" in uses(self.v_scale) and not self.scales_columns

    @property
    def scales_columns(self) -> bool:
        """Whether v has a scale that differs from column to column: of its elements, before they are
        multiplied.
        """
        return reads_columns(self.v_scale)

    @property
    def of_rows(self) -> Expr | None:
        return None if self.scales_keys or self.scales_columns else self.v_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One `attention` block.

    score: float Expr of Dot, indices and loads; without a normalization it is what a key counts, the spec's
    `weight`, and `scored` the place of the score that this is of; mask: bool Expr, TRUE when absent (true =
    keep); lengths: per-batch overrides of M or N (`length N = kv_len[b]`), as int Exprs of b; grads: names of
    inputs that the spec wants gradients of; f32_grads: the inputs among them whose gradients are f32
    regardless of the input's type; segment: keys of a segment under `order = absolute(...)`, a number once
    params are fixed, None where sums come in any order, and `ordered` the place of that; epilogue: what o is,
    a float Expr of Attended, indices (d for the column) and loads; None where it is the attention itself;
    k_scale: what k is to be multiplied by, column by column; k_rest: the load of the columns of keys behind
    those of k, which has fewer than q then; batch, heads_q, heads_kv: sizes as Exprs
    (heads_q is Dim('H'), or Hkv * G in terms of Dims).
    """

    name: str
    params: tuple[Param, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    lengths: Mapping[str, Expr]
    score: Expr
    mask: Expr
    softmax: Softmax
    grads: tuple[str, ...]
    f32_grads: tuple[str, ...] = ()
    epilogue: Expr | None = None
    segment: Expr | None = None
    k_scale: Expr | None = None
    k_rest: Load | None = None
    scored: Span | None = field(default=None, compare=False, repr=False)
    ordered: Span | None = field(default=None, compare=False, repr=False)
    span: Span | None = field(default=None, compare=False, repr=False)

    def tensor(self, name: str) -> Tensor:
        """Returns the input or output of this name; KeyError if there is none."""
        for tensors in (self.inputs, self.outputs):
            for tensor in tensors:
                if tensor.name == name:
                    return tensor
        raise KeyError(name)

    def rewrite(self, expr: Callable[[Expr], Expr], tensor: Callable[[Tensor], Tensor]) -> Attention:
        softmax, rest = self.softmax, self.k_rest and expr(self.k_rest)
        return replace(
            self,
            inputs=tuple(map(tensor, self.inputs)),
            outputs=tuple(map(tensor, self.outputs)),
            lengths={name: expr(value) for name, value in self.lengths.items()},
            score=expr(self.score),
            mask=expr(self.mask),
            softmax=replace(
                softmax,
                sink=softmax.sink and expr(softmax.sink),
                dropout=softmax.dropout and expr(softmax.dropout),
                seed=softmax.seed and expr(softmax.seed),
                first_head=softmax.first_head and expr(softmax.first_head),
                v_scale=softmax.v_scale and expr(softmax.v_scale),
            ),
            epilogue=self.epilogue and expr(self.epilogue),
            segment=self.segment and expr(self.segment),
            k_scale=self.k_scale and expr(self.k_scale),
            k_rest=rest if isinstance(rest, Load) else None,
        )

    @property
    def sized(self) -> Attention:
        """With its loads marked by the sizes of their integers: 64 bits where a param chooses the type."""
        known = {str(dtype): dtype for dtype in DType}
        dtypes = {tensor.name: known.get(tensor.dtype, DType.I64) for tensor in self.inputs}
        return self.rewrite(lambda expr: size_loads(expr, dtypes), lambda tensor: tensor)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """The score, the mask, and those of the softmax and the epilogue: what is computed of inputs, but for
        lengths and the scales of k.
        """
        finishing = () if self.epilogue is None else (self.epilogue,)
        return (self.score, self.mask, *self.softmax.expressions, *finishing)

    @property
    def normalises(self) -> bool:
        """Whether what keys count is divided by a sum, whose logarithm is the lse."""
        return self.softmax.form in ("softmax", "softpick")

    @property
    def segment_keys(self) -> int:
        if self.segment is None:
            return 0
        assert isinstance(self.segment, Const), "a number, once params are fixed"
        return int(self.segment.value)

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """Returns the gradient of an input or output as a tensor: its shape, and the type that the spec
        wants.
        """
        dtype = DType.F32 if tensor.name in self.f32_grads else tensor.dtype
        return replace(tensor, name=f"d{tensor.name}", dtype=dtype)

    @property
    def q(self) -> Tensor:
        return self.tensor("q")

    @property
    def k(self) -> Tensor:
        return self.tensor("k")

    @property
    def v(self) -> Tensor:
        return self.tensor("v")

    @property
    def o(self) -> Tensor:
        return self.tensor("o")

    @property
    def lse(self) -> Tensor | None:
        return next((t for t in self.outputs if t.name == "lse"), None)

    @property
    def column_scales(self) -> Mapping[str, Expr]:
        found = {"k": self.k_scale, "v": self.softmax.v_scale if self.softmax.scales_columns else None}
        return {name: scale for name, scale in found.items() if scale is not None}

    @property
    def column_reads(self) -> tuple[Expr, ...]:
        """What products read beside columns of k and v: their scales, and the columns behind those of k."""
        return (*self.column_scales.values(), *(() if self.k_rest is None else (self.k_rest,)))

    @property
    def joins_values(self) -> bool:
        """Whether values are the first columns of keys as products have them: scaled, joined, of q's type."""
        return isinstance(self.v.storage, Prefix) and self.v.storage.joins

    @property
    def element(self) -> DType:
        """The type of a variant's products: that of q, to which k and v of 8 bits are converted."""
        return DType(self.q.dtype)

    @property
    def batch(self) -> Expr:
        axis = self.q.axis(Role.BATCH)
        return Dim("B") if axis is None else self.q.shape[axis]

    @property
    def heads_q(self) -> Expr:
        return self.q.size(Role.HEAD)

    @property
    def heads_kv(self) -> Expr:
        return self.k.size(Role.HEAD)

    @property
    def group(self) -> Expr:
        group = group_size(self.heads_q, self.heads_kv)
        assert group is not None, "checked when the attention is resolved"
        return group

    @property
    def extras(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.inputs if t.name not in ("q", "k", "v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An attention at one point of its params: no Param node and no dtype name is left in it.

    `name` is the module name in generated/, e.g. "bf16_d128", or "default" when the spec has no params.

    element_param: the param that is the type of q, such as "T", where that has 16 bits: a macro of CUDA
    kernels, so that variants that differ in it alone share them. kernels: the name of those, such as "d128";
    `name` without such a param.
    """

    source: Source
    attention: Attention
    params: Mapping[str, ParamValue]
    name: str
    kernels: str
    element_param: str = ""
