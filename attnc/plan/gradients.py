"""The chain rule, planned: derivatives of the score in a step's names, and what is summed where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Literal, TypeAlias

from attnc.expr.construct import number
from attnc.expr.derive import derive
from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Const, Dim, Dot, Expr, Index, Load, Ref, walk
from attnc.expr.simplify import scale_by, substitute
from attnc.model.attention import Attention
from attnc.plan.ir import Axis, Let
from attnc.plan.ir.backward import Accumulate, Adjoint, Along, Chain, GradientPart, InMemory, Place
from attnc.plan.loads import LoadNames, axes_of
from attnc.plan.names import own_name
from attnc.plan.signature import is_plain
from attnc.plan.softmax import split_scale, split_weight

#: What reads a load.
Reader: TypeAlias = Literal["score", "sink", "epilogue"]
#: What a gradient of an epilogue's load varies along, by the axes of the load in a tile of o.
_IN_EPILOGUE: Mapping[tuple[Axis, ...], tuple[Along, ...]] = {
    (): (),
    ("q",): ("q",),
    ("kv",): ("tile", "d"),
    ("q", "kv"): ("q", "d"),
}
#: Functions worth evaluating once for the score and its derivatives, and the name of the value.
_COSTLY = {name: function.short for name, function in REAL.items() if function.short}
#: Indices that are an axis of their own in f32[B, H, M, N], and the size of that axis.
_PLACES: dict[Index, Expr] = {
    Index("b"): Dim("B"),
    Index("h"): Dim("H"),
    Index("q_idx"): Dim("M"),
    Index("q_pos"): Dim("N"),
    Index("kv_idx"): Dim("N"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRule:
    """The score and its derivatives over the names of one kernel.

    raw_scale, score: as in `ir.Softmax.scale` and `ir.Step.score`.
    """

    raw_scale: float | None
    score: Expr | None
    chain: Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLoad:
    """A load of the score, the sink or the epilogue whose gradient the spec asks for. places: where the axes
    of its tensor are in f32[B, H, *along]; None: the load points anywhere, so its gradient must be scattered.
    """

    name: str
    load: Load
    reader: Reader
    along: tuple[Along, ...]
    places: tuple[Place, ...] | None

    def part(self, accumulate: Accumulate) -> GradientPart:
        return GradientPart(
            name=self.name,
            along=self.along,
            accumulate=accumulate,
            places=() if self.places is None or accumulate == "atomic" else self.places,
        )


def wanted_loads(attention: Attention) -> tuple[WantedLoad, ...]:
    """Returns every load of the score, the sink and the epilogue that a gradient is wanted of, in order of
    appearance.
    """
    sources: list[tuple[Load, Reader]] = [(load, "score") for load, _ in derive(_natural(attention)).loads]
    if attention.softmax.sink is not None:
        sources += ((load, "sink") for load, _ in derive(attention.softmax.sink).loads)
    if attention.epilogue is not None:
        sources += ((load, "epilogue") for load, _ in derive(attention.epilogue).loads)
    kept = [(load, reader) for load, reader in sources if load.tensor in attention.grads]
    taken = {tensor.name for tensor in attention.inputs}
    found = []
    for load, reader in kept:
        base = own_name(f"d{load.tensor}", "sum")
        others = (f"{base}_{i}" for i in count(2))
        name = next(name for name in chain((base,), others) if taken.isdisjoint(names_of_sum(name)))
        taken.update(names_of_sum(name))
        found.append(
            WantedLoad(
                name=name,
                load=load,
                reader=reader,
                along=_IN_EPILOGUE[axes_of(load)] if reader == "epilogue" else axes_of(load),
                places=_places(load, attention),
            )
        )
    return tuple(found)


def find_score_inputs(attention: Attention) -> frozenset[str]:
    """Returns the inputs, beside q, k and v, whose gradients are sums over scores: kernels of their own make
    those of the sink and of the epilogue.
    """
    return frozenset(entry.load.tensor for entry in wanted_loads(attention) if entry.reader == "score")


def names_of_sum(name: str) -> tuple[str, ...]:
    """Returns names of the sum for a gradient: in a thread, of a column and a block, and its place in
    memory.
    """
    return name, f"{name}_column", f"{name}_total", f"{name}_tile"


def _natural(attention: Attention) -> Expr:
    """Returns the score in natural units, its subexpressions spelled as those of the score in base 2 are; of
    a weight, what kernels compute of it.
    """
    if attention.softmax.form == "none":
        return split_weight(attention, at_end=False).rest
    return scale_by(attention.score, 1.0)


def _places(load: Load, attention: Attention) -> tuple[Place, ...] | None:
    if not is_plain(attention):
        return None  # packed sequences have no f32[B, H, M, N]
    places: list[Place] = []
    indices = {**_PLACES, Index("d"): attention.o.shape[-1]}
    for index, extent in zip(load.indices, load.extents, strict=True):
        match index:
            case Const(value=int(at)) if isinstance(extent, Const) and 0 <= at < extent.value:
                places.append(at)
            case Index(name=name) if indices.get(index) == extent and name not in places:
                if attention.lengths and name == "q_pos":
                    return None  # the shift differs from sequence to sequence
                places.append(name)  # type: ignore[arg-type]  # a key of _PLACES
            case _:
                return None
    return tuple(places)


def chain_rule(
    attention: Attention,
    names: LoadNames,
    wanted: Sequence[tuple[WantedLoad, Accumulate]],
    adds_dq: InMemory | None = None,
) -> ChainRule:
    """Returns the score of one kernel, and its derivatives with respect to the dot product and these loads;
    adds_dq: as in `ir.backward.Chain`.
    """
    raw_scale: float | None = None
    factor: Expr | None = None
    if attention.softmax.form != "none":
        raw_scale, raw = split_scale(attention.score)
        natural = _natural(attention)
    else:
        weight = split_weight(attention, at_end=adds_dq is None and not wanted)
        natural = raw = weight.rest
        factor = None if weight.factor is None else names.replace(weight.factor)
    derivative = derive(natural)
    scale, slope = _split_factor(derivative.dot)
    values = dict(derivative.loads)
    score = None if isinstance(raw, Dot) else names.replace(raw)
    slope = None if slope is None else names.replace(slope)
    if attention.v.storage.is_part and scale != 1.0:
        # dk is a sum that has p^T do too, which has no such factor
        constant = Const(scale)
        scale, slope = 1.0, constant if slope is None else Binary("*", slope, constant)
    adjoints = tuple(
        adjoint_of(entry, names.replace(values[entry.load]), accumulate, names)
        for entry, accumulate in wanted
        if entry.reader == "score"
    )
    shared = tuple(_list_shared(score, (slope, *(adjoint.value for adjoint in adjoints)), names))
    mapping: dict[Expr, Expr] = {let.value: Ref(let.name, "float", ("q", "kv")) for let in shared}
    return ChainRule(
        raw_scale=raw_scale,
        score=None if score is None else substitute(score, mapping),
        chain=Chain(
            scale=scale,
            slope=None if slope is None else substitute(slope, mapping),
            shared=shared,
            adjoints=tuple(replace(a, value=substitute(a.value, mapping)) for a in adjoints),
            adds_dq=adds_dq,
            factor=factor,
        ),
    )


def has_constant_slope(attention: Attention) -> bool:
    """Returns whether d score / d dot is one constant."""
    _, slope = _split_factor(derive(_natural(attention)).dot)
    return slope is None


def adjoint_of(entry: WantedLoad, value: Expr, accumulate: Accumulate, names: LoadNames) -> Adjoint:
    """Returns the adjoint of a load, once its value is in the kernel's names."""
    named = names.replace(entry.load)
    fetch = next(fetch for fetch in names.fetches if isinstance(named, Ref) and fetch.name == named.name)
    return Adjoint(
        name=entry.name,
        load=fetch.load,
        value=value,
        guard=fetch.guard,
        along=entry.along,
        accumulate=accumulate,
    )


def _split_factor(slope: Expr) -> tuple[float, Expr | None]:
    constant = number(slope)
    if constant is not None:
        return float(constant), None
    match slope:
        case (
            Binary(op="*", left=rest, right=Const(value=factor))
            | Binary(op="*", left=Const(value=factor), right=rest)
        ):
            return float(factor), rest
        case _:
            return 1.0, slope


def _list_shared(score: Expr | None, others: Iterable[Expr | None], names: LoadNames) -> Iterator[Let]:
    if score is None:
        return
    elsewhere = {node for other in others if other is not None for node in walk(other)}
    inside: set[Expr] = set()
    for node in walk(score):
        costly = isinstance(node, Call) and node.function in _COSTLY and axes_or_dot(node)
        if costly and node in elsewhere and node not in inside:
            assert isinstance(node, Call)
            inside.update(walk(node))
            yield Let(name=names.free_name(_COSTLY[node.function]), value=node)


def axes_or_dot(expr: Expr) -> bool:
    """Returns whether the value varies within a tile."""
    return bool(axes_of(expr)) or any(isinstance(node, Dot) for node in walk(expr))
