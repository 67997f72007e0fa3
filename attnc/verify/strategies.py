"""The cases that Hypothesis draws, beyond those of `covering`.

It sees the structure only, not the tensors, so that shrinking stays fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Const, Dim, Expr, Load, show, walk
from attnc.model.attention import Attention, Variant
from attnc.model.names import DIMS
from attnc.model.tensors import Dense, Paged, Role, Tensor
from attnc.verify.case import Case, Fit, TensorLayout
from attnc.verify.data import EXTRAS, LOGITS, ORDINARY, ORDINARY_VALUES, SPECIALS, VALUES, styles_for
from attnc.verify.inputs_read import find_words
from attnc.verify.storage import LENGTHS, lengths_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a case may cost. tiles: (BLOCK_M, BLOCK_N) of the configs to draw from, by number; longest: M or
    N; work: steps of a tile, summed over all heads; joined: configs with another program for each row, which
    takes a quarter of a step; most: the work of thin cases, which may have more; backward: as how many
    forwards the check of gradients counts.
    """

    tiles: Mapping[int, tuple[int, int]]
    longest: int = 320
    work: int = 48
    joined: frozenset[int] = frozenset()
    most: int = 800
    backward: int = 12

    def cost(self, dims: Mapping[str, int], config: int) -> int:
        block_m, block_n = self.tiles[config]
        steps = -(-dims.get("M", 1) // block_m) * max(-(-dims.get("N", 1) // block_n), 1)
        heads = dims.get("Hkv", 1) * dims.get("G", 1) * dims.get("H", 1)
        rows = dims.get("M", 1) if config in self.joined else 0
        return (steps + rows // 4) * dims.get("B", 1) * heads

    def includes_gradients(self, dims: Mapping[str, int], config: int) -> bool:
        return self.cost(dims, config) * self.backward <= self.most


#: How a module is called: into given results, or for new ones.
CALLS = ("out", "new")
_PRIMES = (3, 13, 37, 61, 97, 131, 257, 521)
_GROUPS = (1, 2, 3, 5, 7, 8)


def free_dims(attention: Attention) -> tuple[str, ...]:
    """Returns sizes that a caller chooses, in order of appearance. H is not one when it is a product of
    others.

    M and N are the longest sequences; sizes of packed tensors and block tables follow from them.
    """
    names: dict[str, None] = {}
    for tensor in attention.inputs:
        names |= dict.fromkeys(node.name for e in tensor.shape for node in walk(e) if isinstance(node, Dim))
        if tensor.storage.is_packed and tensor is attention.q:
            names["M"] = None
        elif tensor.storage.is_packed and tensor.storage != attention.q.storage:
            names["N"] = None
    for tensor in (attention.q, attention.k, attention.v):
        if tensor.storage.is_packed:
            role = Role.QUERY if tensor is attention.q else Role.KEY
            names.pop(show(tensor.size(role)), None)
        if table := tensor.storage.table:
            names.pop(show(attention.tensor(table).shape[1]), None)
    if attention.heads_q != Dim("H"):
        names.pop("H", None)
    return tuple(names)


#: Words of bits in a row, at most: so few that some sequences have more bits to ask for.
MOST_WORDS = 3


def word_dims(attention: Attention) -> frozenset[str]:
    """Returns sizes that count words of bits, along the last axes of inputs."""
    tensors = (tensor for tensor in attention.extras if tensor.name in find_words(attention))
    sizes = (tensor.shape[-1] for tensor in tensors if len(tensor.shape) > 1)
    return frozenset(size.name for size in sizes if isinstance(size, Dim)) - set(DIMS)


def fit_of(attention: Attention, configs: int) -> Fit:
    """Returns the values that a case of the attention may have, given how many configs there are."""
    return Fit(
        dims=free_dims(attention),
        ranks={
            **{tensor.name: len(tensor.shape) for tensor in (*attention.inputs, *attention.outputs)},
            **{f"d{tensor.name}": len(tensor.shape) for tensor in attention.outputs},
        },
        configs=configs,
        logits=LOGITS,
        values=VALUES,
        specials=SPECIALS,
        lengths=LENGTHS,
        extras=EXTRAS,
        calls=CALLS,
    )


def all_dims(attention: Attention, dims: Mapping[str, int]) -> dict[str, int]:
    return {**dims, "H": size(attention.heads_q, dims)}


def size(expr: Expr, dims: Mapping[str, int]) -> int:
    return int(evaluate(expr, Env(dims=dims)).item())


def lengths(attention: Attention, limits: Limits, config: int) -> tuple[int, ...]:
    """Lengths at which something changes: tiles, constants of the mask, and primes."""
    marks = {0, 1, 2, *_PRIMES}
    constants = {node.value for node in walk(attention.mask) if isinstance(node, Const)}
    for size in {*limits.tiles[config], *(int(c) for c in constants if 2 < c <= limits.longest)}:
        marks |= {size - 1, size, size + 1, 2 * size - 1, 2 * size + 1}
    return tuple(sorted(mark for mark in marks if 0 <= mark <= limits.longest))


@st.composite
def cases(draw: st.DrawFn, variant: Variant, limits: Limits) -> Case:
    """Returns a case of this variant that costs no more than the limits allow."""
    attention = variant.attention
    words = word_dims(attention)
    config = draw(st.sampled_from(tuple(limits.tiles)))
    marks = lengths(attention, limits, config)
    dims: dict[str, int] = {}
    for name in sorted(free_dims(attention), key=lambda name: name not in ("M", "N")):
        match name:
            case "M" | "N":
                choices = [n for n in marks if limits.cost({**dims, name: n}, config) <= limits.work]
                dims[name] = draw(st.sampled_from(choices) | st.integers(0, choices[-1]))
            case "B":
                dims[name] = draw(_affordable((1, 2, 3, 0), name, dims, limits, config))
            case "G":
                dims[name] = draw(_affordable(_GROUPS, name, dims, limits, config))
            case "H":  # many heads fill more than one group of programs that share a cache
                dims[name] = draw(_affordable((1, 2, 3, 0, 19), name, dims, limits, config))
            case "Hkv":  # no K/V heads would leave the size of a group open
                dims[name] = draw(_affordable((1, 2, 3), name, dims, limits, config))
            case _ if name in words:
                dims[name] = draw(st.integers(1, MOST_WORDS))
            case _:
                dims[name] = draw(st.integers(1, 2 * limits.tiles[config][1]))
    layouts = {}
    for tensor in (*attention.inputs, *attention.outputs):
        if tensor.shape and draw(st.integers(0, 2)) == 2:
            layouts[tensor.name] = draw(_layouts(attention, tensor))
    for tensor in attention.outputs if attention.grads else ():
        if draw(st.integers(0, 2)) == 2:
            layouts[f"d{tensor.name}"] = draw(_handed_over(tensor))
    stored = (attention.q, attention.k, attention.v)
    apart = tuple(t for t in stored if t.storage.is_plain or t.storage.is_paged)
    spread = draw(st.sampled_from((None,) * 2 * len(apart) + apart)) if apart else None
    if spread is not None and (layout := far(attention, spread, dims)) is not None:
        layouts[spread.name] = layout
    return Case(
        dims=dims,
        seed=draw(st.integers(0, 2**16)),
        logits=draw(st.sampled_from(ORDINARY)),
        values=draw(st.sampled_from(ORDINARY_VALUES)),
        special=draw(st.sampled_from(("none", "none", *SPECIALS))),
        layouts=layouts,
        config=config,
        lengths=draw(st.sampled_from(("drawn", *lengths_for(attention)))),
        extras=draw(st.sampled_from(("drawn", *styles_for(attention)))),
        call=draw(st.sampled_from(CALLS)),
    )


def _affordable(
    choices: tuple[int, ...], name: str, dims: Mapping[str, int], limits: Limits, config: int
) -> st.SearchStrategy[int]:
    kept = [n for n in choices if n == 1 or (n and limits.cost({**dims, name: n}, config) <= limits.work)]
    return st.sampled_from([*8 * kept, 0] if 0 in choices else kept)


@st.composite
def _layouts(draw: st.DrawFn, attention: Attention, tensor: Tensor) -> TensorLayout:
    axes = tuple(range(len(tensor.shape)))
    fixed = axes[-1:] if tensor.name in ("q", "k", "v", "o") else ()
    order = (*draw(st.permutations(axes[: len(axes) - len(fixed)])), *fixed)
    gaps = tuple(draw(st.sampled_from((0, 0, 0, 1, 8))) for _ in axes)
    expandable = [a for a in axes if a not in fixed and (a == 0 or tensor.axis(Role.HEAD) == a)]
    may_expand = tensor in attention.inputs and not tensor.is_sorted and not locates_rows(attention, tensor)
    expanded = (
        tuple(draw(st.sets(st.sampled_from(expandable), max_size=1))) if may_expand and expandable else ()
    )
    offset = draw(st.sampled_from((0, 8, 1, 3)))
    more = draw(st.sampled_from((0, 0, 1))) if tensor.storage.is_paged else 0
    return TensorLayout(order=order, gaps=gaps, expanded=expanded, offset=offset, more=more)


@st.composite
def _handed_over(draw: st.DrawFn, tensor: Tensor) -> TensorLayout:
    axes = tuple(range(len(tensor.shape)))
    return TensorLayout(
        order=tuple(draw(st.permutations(axes))),
        gaps=tuple(draw(st.sampled_from((0, 0, 1, 8))) for _ in axes),
        expanded=draw(st.sampled_from(((), (), axes, axes[:1]))),
        offset=draw(st.sampled_from((0, 8, 1))),
    )


def locates_rows(attention: Attention, tensor: Tensor) -> bool:
    """Returns whether a stride of 0 would put rows of different sequences, or different rows, into one place,
    or give a sequence another length than its pages have.
    """
    for stored in (attention.q, attention.k, attention.v):
        if (tables := stored.storage.tables) and tensor.name in (*tables, stored.name):
            return True
        if stored.storage.is_paged:
            read = (node for node in walk(attention.lengths["N"]) if isinstance(node, Load))
            if any(load.tensor == tensor.name for load in read):
                return True
    return False


def far(attention: Attention, tensor: Tensor, dims: Mapping[str, int]) -> TensorLayout | None:
    """Returns rows so far apart that the last one starts beyond element 2^31, or pages so that the third
    does; None for fewer than three rows, and for packed ones.
    """
    role = Role.QUERY if tensor.axis(Role.KEY) is None else Role.KEY
    if not isinstance(tensor.storage, Dense):
        role = Role.BATCH
    axis = tensor.axis(role)
    return None if axis is None else far_along(attention, tensor, axis, dims)


def far_along(
    attention: Attention, tensor: Tensor, axis: int, dims: Mapping[str, int]
) -> TensorLayout | None:
    """Returns a layout in which the last index of an axis starts beyond element 2^31, while the stride still
    has 32 bits; None for fewer than three indices, for an axis that has to be contiguous, and for a tensor
    with a size that is none of these (`storage.memory_dims` has all).
    """
    known, pages = all_dims(attention, dims), {}
    if isinstance(tensor.storage, Paged):
        pages = {Role.KEY: tensor.storage.page, Role.BATCH: 3}
    roles = tensor.roles or (None,) * len(tensor.shape)
    try:
        pairs = zip(roles, tensor.shape, strict=True)
        shape = [pages[role] if role in pages else size(expr, known) for role, expr in pairs]
    except KeyError:
        return None
    last = len(shape) - 1
    is_fixed = axis == last and (tensor.axis(Role.FEATURE) == last)
    others = [other for other in range(len(shape)) if other != axis]
    if is_fixed or shape[axis] < 3 or 0 in shape:
        return None
    if not others:
        return TensorLayout(order=(0,), gaps=(0,), step=-(-(2**31) // (shape[0] - 1)))
    inner = prod(shape[other] for other in others[1:])
    gaps = [0] * len(shape)
    gaps[others[0]] = -(-(2**31) // ((shape[axis] - 1) * inner))
    # The odd offset keeps the copy engine away, which computes its addresses itself.
    return TensorLayout(order=(axis, *others), gaps=tuple(gaps), offset=1)
