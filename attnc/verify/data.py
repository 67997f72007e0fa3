"""Numbers for q, k, v: logits and values that have broken attention kernels, from a counter-based generator;
and for other inputs those at which masks, scores and dropout change their nature.

A style is a name. The same (style, seed, shape) always gives the same numbers: a case is a few integers.
Arrays are float64 in canonical order: q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from attnc.expr.interval import Range, range_of
from attnc.expr.nodes import Const, Dim, Expr, Load, Ref, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Tensor
from attnc.plan.kept_blocks import wants_list
from attnc.reference import Array, Floats
from attnc.verify.inputs_read import (
    addends,
    addresses,
    find_compared,
    find_counts,
    find_divisors,
    find_saturated,
    find_sinks,
    find_slopes,
    find_terms,
    lists,
    probabilities,
)

Rng: TypeAlias = np.random.Generator


def generator(seed: int, stream: int) -> Rng:
    """Returns independent numbers for each (seed, stream)."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, stream]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSizes:
    """Canonical sizes of a dense problem."""

    B: int
    M: int
    N: int
    H: int
    Hkv: int
    D: int
    Dv: int


def _random(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    return rng.standard_normal((at.B, at.M, at.H, at.D)), rng.standard_normal((at.B, at.N, at.Hkv, at.D))


def _large(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    q, k = _random(rng, at)
    return 4 * q, 4 * k


def _constant(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    q, k = _random(rng, at)
    return q, np.broadcast_to(k[:, :1], k.shape)


def _draw_aligned(rng: Rng, at: DenseSizes, logits: Floats) -> tuple[Floats, Floats]:
    """Returns q and k along one direction, so that q.k/sqrt(D) of key j is about `logits[j]`."""
    direction = rng.choice([-1.0, 1.0], size=at.D)
    size = np.sqrt(np.abs(logits).max(initial=1.0)) / at.D**0.25
    q = np.broadcast_to(direction * size, (at.B, at.M, at.H, at.D))
    k = logits[:, None, None] / (size * np.sqrt(at.D)) * direction
    noise = 1 + 2.0**-4 * rng.standard_normal((at.B, at.N, at.Hkv, 1))
    return q * (1 + 2.0**-5 * rng.random((at.B, at.M, at.H, 1))), np.broadcast_to(
        k, (at.B, at.N, at.Hkv, at.D)
    ) * noise


def _spike(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    logits = np.zeros(at.N)
    if at.N:
        logits[rng.integers(at.N)] = 40
    q, k = _draw_aligned(rng, at, logits)
    return q, k + 2.0**-6 * rng.standard_normal(k.shape)


def _own_key(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Gives every row a key of its own that outweighs all others, beyond float32 where heads have 64 columns:
    each key of a tile is the maximum of some row, and rows side by side have other results.
    """
    code = rng.choice([-1.0, 1.0], (at.B, at.N, at.Hkv, at.D))
    own = rng.integers(0, max(at.N, 1), (at.B, at.M, at.H))
    # of half of the rows one that a causal mask keeps
    seen = np.clip(np.arange(at.M) + at.N - at.M + 1, 1, max(at.N, 1))[:, None]
    own = np.where(rng.random(own.shape) < 0.5, own % seen, own)
    if not at.N or not at.Hkv:
        return _random(rng, at)
    head = np.arange(at.H) // max(at.H // at.Hkv, 1)
    q = code[np.arange(at.B)[:, None, None], own, head]
    size = np.sqrt(23.0)
    return size * q, size * code


def _climbing(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Moves the maximum from tile to tile of a long row, up or down by row: what each step rounds of a sum
    that is rescaled adds up.
    """
    q, k = _draw_aligned(rng, at, np.linspace(-30, 30, at.N))
    noise = (2.0**-2 * x for x in _random(rng, at))
    return rng.choice([-1.0, 1.0], (at.B, at.M, at.H, 1)) * q + next(noise), k + next(noise)


def _rising(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Moves the maximum at every key, so that every step rescales."""
    return _draw_aligned(rng, at, np.linspace(-20, 20, at.N))


def _falling(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Makes the first key outweigh the rest, so that late tiles underflow."""
    return _draw_aligned(rng, at, np.linspace(60, -60, at.N))


def _very_negative(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Puts all logits below -5e4, where a finite stand-in for -inf would win."""
    return _draw_aligned(rng, at, np.linspace(-6.5e4, -6.4e4, at.N))


def _huge(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Puts all logits above 5e4: exp overflows unless the maximum is subtracted first."""
    return _draw_aligned(rng, at, np.linspace(6.4e4, 6.5e4, at.N))


def _low(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Returns q and k of scores far below 0, where sums of exponentials are small but no zero: a fixed
    maximum is a bad guess.
    """
    return _draw_aligned(rng, at, np.linspace(-86, -55, at.N))


def _last(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Makes the last keys outweigh the others beyond float32: a maximum that misses them overflows."""
    logits = np.zeros(at.N)
    logits[-max(at.N // 100, 1) :] = 150
    return _draw_aligned(rng, at, logits)


def _bump(share: float) -> Callable[[Rng, DenseSizes], tuple[Floats, Floats]]:
    """Makes keys at a share of all outweigh the others by e^40 in some rows, by e^120 in some, and by little
    in the rows beside them: a maximum that is looked for at first alone, from whichever end, has to move in
    the first, and an infinite sum does not tell where to in the second.
    """

    def draw(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
        logits, first = np.zeros(at.N), int(share * at.N)
        logits[first : first + 3] = 40
        q, k = _draw_aligned(rng, at, logits)
        return q * rng.choice([0.1, 1.0, 3.0], (at.B, at.M, at.H, 1)), k

    return draw


def _alternating(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    """Returns q and k where keys are one direction, forth and back: between values that alternate too every
    key adds as much to dq, and what a narrow sum leaves out adds up.
    """
    q, k = _random(rng, at)
    sign = np.where(np.arange(at.N) % 2, 1.0, -1.0)[None, :, None, None]
    return 0.1 * q, sign * (1 + np.abs(k[:, :1])) if at.N else k


def _zero_q(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    q, k = _random(rng, at)
    return np.copysign(0.0, q), k


def _duplicates(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    q, k = _random(rng, at)
    return 2 * q, 2 * k[:, np.arange(at.N) // 2]


def _denormal(rng: Rng, at: DenseSizes) -> tuple[Floats, Floats]:
    q, k = _random(rng, at)
    return q * 2.0**-20, k * 2.0**-16


LOGITS: Mapping[str, Callable[[Rng, DenseSizes], tuple[Floats, Floats]]] = {
    "random": _random,
    "large": _large,
    "constant": _constant,
    "spike": _spike,
    "own_key": _own_key,
    "rising": _rising,
    "falling": _falling,
    "very_negative": _very_negative,
    "huge": _huge,
    "low": _low,
    "zero_q": _zero_q,
    "duplicates": _duplicates,
    "denormal": _denormal,
    "last": _last,
    "bump": _bump(0.5),
    "early_bump": _bump(0.2),
    "alternating": _alternating,
    "climbing": _climbing,
}
#: Those that a case has for a purpose: splits that are joined, sums over many tiles, maxima that are lazy.
PURPOSEFUL = ("last", "alternating", "bump", "early_bump", "climbing")
ORDINARY = tuple(style for style in LOGITS if style not in PURPOSEFUL)


def _cancelling(rng: Rng, v: Floats) -> Floats:
    """Neighbours nearly cancel: the sum is far smaller than its terms."""
    sign = np.where(np.arange(v.shape[1]) % 2, 1.0, -1.0)[None, :, None, None]
    return sign * 100 + v


def _one_hot(rng: Rng, v: Floats) -> Floats:
    keys, features = np.arange(v.shape[1])[:, None, None], np.arange(v.shape[3])
    return np.broadcast_to((keys % max(v.shape[3], 1) == features) * 1.0, v.shape)


def _ends(rng: Rng, v: Floats) -> Floats:
    """Leaves values of the first keys in odd columns, of the last ones in even columns, and nothing between:
    what a maximum that moves in the middle does to a sum is all that its columns show.
    """
    keys, features = np.arange(v.shape[1])[:, None, None], np.arange(v.shape[3])
    few = -(-v.shape[1] // 4)
    return np.asarray(np.where(np.where(features % 2, keys, v.shape[1] - 1 - keys) < few, np.abs(v) + 1, 0.0))


VALUES: Mapping[str, Callable[[Rng, Floats], Floats]] = {
    "random": lambda rng, v: v,
    "positive": lambda rng, v: np.abs(v) + 1,
    "ones": lambda rng, v: np.ones_like(v),
    "one_hot": _one_hot,
    "ends": _ends,
    "cancelling": _cancelling,
    "zeros": lambda rng, v: np.copysign(0.0, v),
    "denormal": lambda rng, v: v * 2.0**-22,
    "vast": lambda rng, v: v,
}
#: Those that every kernel takes; `vast` ones are for guesses of a maximum, which values may overflow under.
ORDINARY_VALUES = tuple(style for style in VALUES if style != "vast")

#: Which tensor gets a special value, and which.
SPECIALS: Mapping[str, tuple[str, float] | None] = {
    "none": None,
    "nan_q": ("q", np.nan),
    "nan_k": ("k", np.nan),
    "inf_k": ("k", np.inf),
    "nan_v": ("v", np.nan),
    "inf_v": ("v", np.inf),
}


def draw_qkv(
    at: DenseSizes,
    *,
    dtype: DType,
    seed: int,
    logits: str = "random",
    values: str = "random",
    special: str = "none",
) -> dict[str, Floats]:
    """Returns q, k and v in these styles, in float64 but of magnitudes that the type holds."""
    q, k = LOGITS[logits](generator(seed, 0), at)
    rng = generator(seed, 1)
    v = VALUES[values](rng, rng.standard_normal((at.B, at.N, at.Hkv, at.Dv)))
    tensors = {"q": np.array(q), "k": np.array(k), "v": np.array(v)}
    chosen = SPECIALS[special]
    if chosen is not None and tensors[chosen[0]].size:
        array = tensors[chosen[0]]
        b, row, h, d = (int(rng.integers(n)) for n in array.shape)
        array[b, row, h, d] = chosen[1]
    if dtype is DType.BF16 and values == "denormal":
        tensors["v"] *= 2.0**-110  # bfloat16 has the range of float32
    if dtype in (DType.BF16, DType.F32) and values == "vast":
        tensors["v"] *= 2.0**80
    return tensors


#: The ends of i32, and their neighbours; positions that no sequence has.
_ENDS = (-(2**31), -(2**31) + 1, -(2**30), -1, 0, 1, 2**30, 2**31 - 2, 2**31 - 1)
#: How far integers of 64 bits go; nothing that is made from them may leave as many, which is not defined.
_FAR = (2**61, 2**53, 2**40, 2**32 + 1)
_ROOM = Range(-(2**62), 2**62)


def draw_integers(rng: Rng, shape: tuple[int, ...], at: DenseSizes, *, far: int = 0) -> Array:
    """Integers as masks read them: lengths, places, widths. Those of one tensor in four are extreme: what i32
    holds, and i64 up to `far`, and the numbers around M and N.
    """
    marks = np.array([0, 1, at.N // 2, max(at.N - 1, 0), at.N, at.N + 1])
    near = np.where(
        rng.random(shape) < 0.5, rng.choice(marks, shape), rng.integers(0, max(at.M, at.N) + 2, shape)
    )
    if rng.random() >= 0.25:
        return near
    ends = np.array([*_ENDS, *((-far, far) if far else ()), -at.N, at.N - at.M, at.M, at.M - 1, -at.M])
    return np.where(rng.random(shape) < 0.75, rng.choice(ends, shape), near)


def draw_words(rng: Rng, shape: tuple[int, ...], dtype: DType) -> Array:
    """Words whose bits are read: few of them set, half, or nearly all, each word its own; of one tensor in
    four all bits of a word, none, or those at its ends.
    """
    bits = 8 * dtype.bytes
    if rng.random() < 0.25:
        ends = np.array([0, 1, 2, 1 << (bits - 2), 1 << (bits - 1), (1 << bits) - 1], np.uint64)
        words = rng.choice(ends, shape)
    else:
        is_set = rng.random((*shape, bits)) < rng.choice([0.1, 0.5, 0.9])
        words = (is_set.astype(np.uint64) << np.arange(bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)
    kept: Array = words if dtype is DType.U8 else words.astype(f"uint{bits}").view(f"int{bits}")
    return kept.astype(np.int64)


def farthest(exprs: Iterable[Expr], wide: Collection[str]) -> int:
    """Returns how large integers of these tensors may be, so that nothing in the expressions leaves 64 bits,
    with room for what kernels make of them; 0 if no larger than those of 32 bits.
    """
    nodes = [node for expr in exprs for node in walk(expr)]
    ints = [node for node in nodes if node.type == "int" and not isinstance(node, Const)]
    for far in _FAR:
        known: dict[Expr, Expr] = {
            node: Ref(node.tensor, "int", within=(-far, far))
            for node in nodes
            if isinstance(node, Load) and node.tensor in wide
        }
        if all(range_of(substitute(node, known)).is_within(_ROOM) for node in ints):
            return far
    return 0


def draw_counts(rng: Rng, shape: tuple[int, ...], most: int) -> Array:
    """Lengths of sequences with room for `most` rows; of one tensor in four some are negative, which counts
    as 0, or longer than there is room for.
    """
    counts = rng.integers(0, most + 1, shape)
    if rng.random() >= 0.25:
        return counts
    beyond = np.array([-(2**31), -1, most + 1, 2**31 - 1])
    return np.where(rng.random(shape) < 0.5, rng.choice(beyond, shape), counts)


#: Entries that a kernel compares with each other at once (`templates/triton/_lists.py.jinja`), and those of a
#: longer list that come again.
_LONG_LIST, _AGAIN = 128, 8
#: Entries that name no block.
_NO_BLOCKS = (-1, -(2**31), 2**30, 2**31 - 1)


def draw_lists(rng: Rng, shape: tuple[int, ...], blocks: int, *, distinct: bool) -> Array:
    """Returns lists of blocks, along the last axis: all blocks, a few neighbours, the same blocks for all
    queries, or any, with repetitions unless they are distinct: of long lists, the last entries are the first
    ones again. Some entries name no block; in one tensor of eight, no entry does.
    """
    places, rows = shape[-1], shape[:-1]
    most = max(blocks, 1)
    order = np.argsort(rng.random((*rows, max(most, places))), axis=-1)[..., :places]
    style = rng.integers(0, 8)
    found: Array = np.where(order < most, order, -1)
    if style == 0:
        found = np.full(shape, -1)
    elif style == 1 and found.size:
        found = np.broadcast_to(found.reshape(-1, places)[0], shape).copy()
    elif style <= 3:
        found = rng.integers(0, most, (*rows, 1)) + np.arange(places)
    elif style <= 5 and not distinct:
        found = rng.integers(-1, most + 1, shape)
    if places > _LONG_LIST and not distinct:
        found[..., -_AGAIN:] = found[..., :_AGAIN]
    few = rng.random((*rows, 1)) < 0.3
    gone = (rng.random(shape) < 0.15) | (few & (rng.random(shape) < 0.7))
    return np.asarray(np.where(gone, rng.choice(_NO_BLOCKS, shape), found))


def draw_ids(rng: Rng, shape: tuple[int, ...]) -> Array:
    """Returns numbers of documents, of which there are few; those of one tensor in eight are at the ends of
    i32.
    """
    ids = rng.integers(0, 4, shape)
    ends = np.array([-(2**31), -1, 2**31 - 2, 2**31 - 1])
    return np.asarray(ends[ids]) if rng.random() < 0.125 else ids


def ascending(array: Array, rng: Rng) -> Array:
    """Returns the rows of an input that is sorted. Each ascends at its own pace, quickly or slowly at first,
    so that a search finds different places in each.
    """
    found: Array = np.sort(array, axis=-1)
    if array.ndim < 2 or not array.size:
        return found
    count = array.shape[-1]
    pace = rng.choice([0.25, 1.0, 4.0], (*array.shape[:-1], 1))
    at = (count * (np.arange(count) / count) ** pace).astype(np.int64)
    return np.take_along_axis(found, at, axis=-1)


def descending(array: Array, rng: Rng) -> Array:
    """Returns the rows of an input that descends: each falls at its own pace, from not at all to more than a
    margin of scores from key to key.
    """
    if not array.size:
        return array
    steps = np.abs(np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=1.0)).clip(max=4.0)
    pace = rng.choice([0.0, 0.03, 0.3, 3.0, 60.0], (*array.shape[:-1], 1))
    return np.asarray(rng.normal(size=pace.shape) - np.cumsum(pace * steps, axis=-1))


# --- inputs besides these -----------------------------------------------------------------------------------


def _draw(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    return drawn


def _zero(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    return np.zeros_like(drawn)


def _one(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    return np.ones_like(drawn)


def _negative(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Scales turn scores around; quotients and remainders of integers round below zero."""
    if drawn.dtype == np.bool_:
        return ~drawn
    if tensor.name in probabilities(attention):
        return drawn
    if np.issubdtype(drawn.dtype, np.integer):
        return np.minimum(drawn, ~drawn)  # the least integer has no opposite
    return -np.abs(drawn)


def _mask(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Makes what is added to a score -inf: in whole rows, and here and there."""
    if tensor.name not in addends(attention) or not drawn.ndim:
        return drawn
    rows = rng.random((*drawn.shape[:-1], 1)) < 0.3
    return np.where(rows | (rng.random(drawn.shape) < 0.2), -np.inf, drawn)


def _endless(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Some of what is added to a score or taken from it is infinite, either way: such rows are no numbers."""
    if tensor.name not in find_terms(attention):
        return drawn
    return np.where(rng.random(drawn.shape) < 0.3, rng.choice([-np.inf, np.inf, np.inf], drawn.shape), drawn)


def _many(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Ids of so many things that each has a few positions; what is searched holds many values."""
    if not drawn.ndim or tensor.name not in find_compared(attention):
        return drawn
    found: Array = rng.integers(0, max(drawn.shape[-1] // 6, 2), drawn.shape)
    return found


def _runs(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Many neighbours are equal, so that a mask that compares them keeps all pairs of a block, or none. In
    every other tensor some begin at a number of the mask, where that is far from the first key.
    """
    if not drawn.ndim or not drawn.size or np.issubdtype(drawn.dtype, np.floating):
        return drawn
    found, run = drawn, rng.choice(_RUNS)
    numbers = [x.value for x in walk(attention.mask) if isinstance(x, Const) and type(x.value) is int]
    far = [number for number in numbers if max(_RUNS) < number < drawn.shape[-1]]
    before = -max(far) % run if far and rng.random() < 0.5 else 0
    for axis in range(max(drawn.ndim - 2, 0), drawn.ndim):
        if axis == drawn.ndim - 1 or drawn.shape[axis] > min(_RUNS):  # else sequences, or heads
            found = np.take(found, (np.arange(drawn.shape[axis]) + before) // run, axis=axis)
    return found


def _far(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Here and there what a function of the epilogue reads is so large that its exponential overflows, or the
    product of two of them does; and a sink is as far from any score, or a guess of the maximum, or -inf.
    """
    if tensor.name in find_saturated(attention):
        ends = rng.choice([-1.0, 1.0], drawn.shape) * rng.uniform(30, 200, drawn.shape)
    elif tensor.name in find_sinks(attention):
        ends = rng.choice([-np.inf, -1e4, -300.0, -90.0, 90.0, 300.0, 1e4], drawn.shape)
    else:
        return drawn
    return np.where(rng.random(drawn.shape) < 0.4, ends, drawn)


def _steep(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Some of what multiplies a position, such as a slope, is infinite, and some 0."""
    if tensor.name not in find_slopes(attention):
        return drawn
    return np.where(rng.random(drawn.shape) < 0.7, rng.choice([-np.inf, np.inf, 0.0], drawn.shape), drawn)


def _divide(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Here and there what integers are divided by is 0, -1 or the least number of 32 bits."""
    if tensor.name not in find_divisors(attention):
        return drawn
    least, most = (0, 255) if tensor.dtype is DType.U8 else (-(2**31), 2**31 - 1)
    ends = np.array([0, 1, most, *((-1, -2, least) if least else ())])
    return np.where(rng.random(drawn.shape) < 0.75, rng.choice(ends, drawn.shape), drawn)


def _whole(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Lists name the first blocks, each once and none besides, and all of their entries count."""
    if tensor.name in lists(attention) and drawn.ndim:
        return np.broadcast_to(np.arange(drawn.shape[-1]), drawn.shape)
    most = 255 if tensor.dtype is DType.U8 else 2**30
    return np.full_like(drawn, most) if tensor.name in find_counts(attention) else drawn


def _late(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Of a block of queries beside twice as many keys only the last ones see the first keys, all of these."""
    axis = next((tensor.shape.index(size) for size in (Dim("M"), Dim("N")) if size in tensor.shape), None)
    if axis is None or np.issubdtype(drawn.dtype, np.floating):
        return drawn
    count = drawn.shape[axis]
    at = np.arange(count).reshape(-1, *(1,) * (drawn.ndim - axis - 1))
    seen = (at >= count - _LATE) | ((tensor.shape[axis] == Dim("N")) & (at < count // 2))
    return np.broadcast_to(seen, drawn.shape).astype(drawn.dtype)


#: The last queries of a block, of which none is tried before the others.
_LATE = 32
#: Neighbours that are equal: more than a block of a mask has, and more than two.
_RUNS = (130, 256, 300)

EXTRAS: Mapping[str, Callable[[Attention, Tensor, Array, Rng], Array]] = {
    "drawn": _draw,
    "zero": _zero,
    "one": _one,
    "negative": _negative,
    "masked": _mask,
    "many": _many,
    "runs": _runs,
    "far": _far,
    "divisors": _divide,
    "steep": _steep,
    "endless": _endless,
    "whole": _whole,
    "late": _late,
}


def restyle(attention: Attention, tensor: Tensor, drawn: Array, style: str, rng: Rng) -> Array:
    """Returns the numbers of an input in this style; what says where rows lie, and seeds, stay as
    they are.
    """
    if tensor.name in addresses(attention):
        return drawn
    return EXTRAS[style](attention, tensor, drawn, rng)


def styles_for(attention: Attention) -> tuple[str, ...]:
    """Returns the styles that make a difference to this attention, the ordinary one first."""
    free = [tensor for tensor in attention.extras if tensor.name not in addresses(attention)]
    if not free:
        return ("drawn",)
    found = ["drawn", "zero", "one", "negative"]
    if any(tensor.shape and tensor.name in addends(attention) for tensor in free):
        found.append("masked")
    if any(tensor.shape and tensor.name in find_compared(attention) for tensor in free):
        found.append("many")
    if wants_list(attention):
        found.append("runs")
    for style, read in (
        ("far", find_saturated(attention) | find_sinks(attention)),
        ("divisors", find_divisors(attention)),
        ("steep", find_slopes(attention)),
        ("endless", find_terms(attention)),
    ):
        if any(tensor.name in read for tensor in free):
            found.append(style)
    return tuple(found)
