"""The callable's arguments: which axis binds which size, which strides a kernel takes.

The number of query heads is always the size H in a kernel, however the spec spells it (`H`, `Hkv * G`, or `G`
over one KV head);
G is then H // Hkv. `normalise` rewrites the attention's expressions accordingly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from attnc.expr.nodes import Binary, Const, Dim, Expr, Load, children, rebuild, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention
from attnc.model.names import DIMS
from attnc.model.tensors import DType, Role, Tensor, same_size
from attnc.plan.ir import Arg, Bind
from attnc.plan.names import own_sizes
from attnc.plan.storage import PAGES, capacity
from attnc.plan.storage import memory as memory_of
from attnc.plan.width import saturated

H, HKV = Dim("H"), Dim("Hkv")


def normalise(attention: Attention) -> Attention:
    """The same attention with its query-head count spelled H everywhere, and that of k and v H, 1 or Hkv;
    sizes whose names generated code has other uses for are called otherwise.
    """
    heads, kv = _heads(attention.q), _heads(attention.k)
    kv_heads = H if same_size(heads, kv) else kv if kv == Const(1) else HKV
    # A number stays a number in expressions: it may stand for something else there.
    mapping: dict[Expr, Expr] = {} if isinstance(heads, Const) else {heads: H}
    chosen = {name: None for name in size_names(attention) if name not in DIMS}
    own = own_sizes(tuple(chosen), tuple(tensor.name for tensor in attention.inputs))
    mapping |= {Dim(name): Dim(other) for name, other in own.items()}
    wide = {tensor.name for tensor in attention.inputs if tensor.dtype is DType.I64}

    def fix(expr: Expr) -> Expr:
        return _widened(substitute(expr, mapping), wide)

    def fix_size(tensor: Tensor, axis: int) -> Expr:
        size = tensor.shape[axis]
        if tensor.roles and tensor.roles[axis] is Role.HEAD:
            return kv_heads if tensor.name in ("k", "v") else H
        return H if not isinstance(heads, Const) and same_size(size, heads) else fix(size)

    def fix_tensor(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=tuple(fix_size(tensor, axis) for axis in range(len(tensor.shape))))

    made = attention.rewritten(fix, fix_tensor)
    return replace(made, mask=replace(saturated(made.mask), span=made.mask.span))


def size_names(attention: Attention) -> Iterator[str]:
    """The names of sizes of the inputs, in order of appearance."""
    for tensor in attention.inputs:
        for size in tensor.shape:
            yield from (node.name for node in walk(size) if isinstance(node, Dim))


def _widened(expr: Expr, wide: Collection[str]) -> Expr:
    """The expression with loads of these tensors marked as integers of 64 bits."""
    expr = rebuild(expr, tuple(_widened(child, wide) for child in children(expr)))
    return replace(expr, wide=True) if isinstance(expr, Load) and expr.tensor in wide else expr


def kv_heads(attention: Attention) -> Expr:
    """Number of KV heads of a normalised attention: H (no sharing), Const(1), or Dim('Hkv')."""
    return _heads(attention.k)


def _heads(tensor: Tensor) -> Expr:
    axis = tensor.axis(Role.HEAD)
    if axis is None:
        raise ValueError(f"{tensor.name} has no head axis")
    return tensor.shape[axis]


def arguments(declared: Attention) -> tuple[Arg, ...]:
    """Inputs in declaration order; the first axis that mentions a size alone binds it, every later one must
    agree. q, k and v come first, since other sizes follow from theirs; G is computed from H and Hkv.
    """
    attention = normalise(declared)
    bound = {"G", *(size.name for size in capacity(attention))}
    fixed = {
        name: size
        for name, size in (("H", _heads(declared.q)), ("Hkv", _heads(declared.k)))
        if isinstance(size, Const)
    }
    passed = [memory for t in attention.inputs if (memory := memory_of(t)) is not None]
    made = {t.name: _argument(t, bound, fixed) for t in sorted(passed, key=lambda t: not t.roles)}
    return tuple(made[t.name] for t in passed)


def results(attention: Attention) -> tuple[Arg, ...]:
    """Outputs in declaration order; every size is bound by then."""
    everything = {
        node.name
        for t in attention.inputs
        for size in t.shape
        for node in walk(size)
        if isinstance(node, Dim)
    }
    return tuple(_argument(tensor, set(everything) | {"H"}, {}) for tensor in attention.outputs)


def kept(attention: Attention) -> tuple[Arg, ...]:
    """lse as f32[B, H, M], of packed sequences f32[H, rows], where it is not an output: the backward
    recomputes the probabilities from it.
    """
    if attention.lse is not None:
        return ()
    roles = tuple(role for role in (Role.BATCH, Role.HEAD, Role.QUERY) if role in attention.q.roles)
    sizes = {Role.BATCH: Dim("B"), Role.HEAD: H, Role.QUERY: attention.q.size(Role.QUERY)}
    lse = Tensor(name="lse", dtype=DType.F32, shape=tuple(sizes[role] for role in roles), roles=roles)
    known = {size.name for size in sizes.values() if isinstance(size, Dim)}
    return (_argument(lse, known, {}),)


def _argument(tensor: Tensor, bound: set[str], fixed: Mapping[str, Expr]) -> Arg:
    """fixed: sizes that have a name in the kernel, although the spec says what they are."""
    binds = []
    for size in tensor.shape:
        match size:
            case Dim() if size == PAGES:
                binds.append(Bind())
            case Dim(name=name) if name not in bound:
                bound.add(name)
                binds.append(Bind(name=name, expected=fixed.get(name)))
            case Binary(op="+", left=Dim(name=name), right=Const(value=int() as plus)) if name not in bound:
                bound.add(name)
                binds.append(Bind(name=name, plus=plus))
            case _:
                binds.append(Bind(expected=size))
    return Arg(
        tensor=tensor,
        axes=tuple(binds),
        strides=tuple(stride_name(tensor, axis) for axis in range(len(tensor.shape))),
    )


_LETTER = {Role.BATCH: "b", Role.HEAD: "h", Role.QUERY: "m", Role.KEY: "n", Role.FEATURE: ""}


def stride_name(tensor: Tensor, axis: int) -> str:
    """Name of the kernel argument with the axis's stride; "" for the feature axis, which is contiguous."""
    if not tensor.roles:
        return f"stride_{tensor.name}_{axis}"
    role = tensor.roles[axis]
    letter = "p" if role is Role.BATCH and tensor.storage.is_paged else _LETTER[role]
    return "" if role is Role.FEATURE else f"stride_{tensor.name}{letter}"


#: The index along an axis, and the name of the axis's stride.
Term: TypeAlias = tuple[str, str]


def row_zero(tensor: Tensor, *, head: str, first: str | None) -> tuple[Term, ...]:
    """Where row 0 of the sequence and head at hand lies: products of indices and strides to be added.

    head: the index of the head, "" where all heads have the same rows; first: the number of the sequence's
    first row, None where sequences have a batch entry each. Of rows in pages: where the head lies in a page.
    """
    rows = Role.QUERY if tensor.axis(Role.KEY) is None else Role.KEY
    sequence = [] if tensor.storage.is_paged else [("b", Role.BATCH)] if first is None else [(first, rows)]
    terms = [*sequence, *([(head, Role.HEAD)] if head else [])]
    axes = ((index, tensor.axis(role)) for index, role in terms)
    return tuple((index, stride_name(tensor, axis)) for index, axis in axes if axis is not None)


def unbound(args: tuple[Arg, ...]) -> frozenset[str]:
    """Sizes that appear only inside products or sums, so that no axis can bind them (G is derived from H and
    Hkv).
    """
    bound = {bind.name for arg in args for bind in arg.axes if bind.name}
    used = {
        node.name
        for arg in args
        for bind in arg.axes
        if bind.expected is not None
        for node in walk(bind.expected)
        if isinstance(node, Dim)
    }
    return frozenset(used - bound - {"G"})
