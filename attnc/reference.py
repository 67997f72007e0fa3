"""The meaning of an attention: a float64 evaluation on the exact low-precision inputs.

    s_ij   = score(q_i . k_j, indices, loads)            for the keys j that row i may see, else -inf
    lse_i  = log(sum_j exp(s_ij) + exp(sink))            no sink term when the spec has none
    a_id   = scale_i * sum_j keep_ij / (1 - p) * exp(s_ij - lse_i) * v_jd   with a scale of v, else 1
    o_id   = epilogue(a_id, indices, loads)          a_id where the spec has none

Without a normalization, score is the weight itself, and

    a_id   = sum_j s_ij v_jd                         over the keys j that row i may see; there is no lse

This module shares nothing with the planner, the interval analysis or the templates, so that it cannot be
wrong together with them.

Where a formula leaves room, these are the decisions:

* A score of -inf is the same as a masked key. A row that sees no key has o = 0 and, without a sink,
  lse = -inf; with a sink its lse is the sink. Rows and keys beyond a `length` do not exist: such rows of the
  outputs are o = 0, lse = -inf.
* A masked key has no influence, even if it is NaN. A NaN or +inf among the visible scores makes o and lse of
  the row NaN.
* The sink joins the denominator and the lse (as in gpt-oss), never the output.
* Dropout keeps a probability where `keep` is true and scales it by 1/(1 - p); the lse is without dropout.
* The epilogue of a row that sees no key is that of an attention of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import COLUMN, Dim, Expr, walk
from attnc.model.attention import EPSILON, Attention, Form
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Ragged, Role, Tensor

if TYPE_CHECKING:
    import torch


# --- tensors of a call as arrays ----------------------------------------------------------------------------


Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Integers: TypeAlias = npt.NDArray[np.int64]
Input: TypeAlias = "Array | torch.Tensor | bool | int | float"


def to_arrays(attention: Attention, tensors: Mapping[str, Input]) -> dict[str, Array]:
    """Returns every input as a NumPy array: floats exactly in float64, the rest as they are.

    Numbers are rounded to the declared type first.
    """
    arrays: dict[str, Array] = {}
    for tensor in attention.inputs:
        if tensor.storage.is_part:
            continue
        value = tensors[tensor.name]
        if isinstance(value, bool | int | float):
            value = _round(value, DType(tensor.dtype))
        elif not isinstance(value, np.ndarray):
            value = value.detach().cpu()
            value = value.double().numpy() if value.is_floating_point() else value.numpy()
        if value.ndim != len(tensor.shape):
            raise ValueError(f"'{tensor.name}' has {value.ndim} axes, the spec declares {len(tensor.shape)}")
        arrays[tensor.name] = value.astype(np.float64) if value.dtype.kind == "f" else value
    return arrays


def _round(value: float, dtype: DType) -> Array:
    if dtype is DType.BF16:
        return bf16_to_f32(f32_to_bf16(np.asarray(value, np.float32)))
    types = {DType.F32: np.float32, DType.F16: np.float16, DType.BOOL: np.bool_}
    return np.asarray(value, dtype=types.get(dtype, np.int64))


def bf16_to_f32(bits: Array) -> Array:
    """Returns the float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Returns bit patterns of float32 values rounded to nearest even; every NaN becomes 0x7fc0, as in
    torch.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(values.shape)


def empty_outputs(attention: Attention, arrays: Mapping[str, Array]) -> dict[str, Floats]:
    """Returns the outputs as if no row saw anything: 0, and -inf for lse."""
    dims = bind(attention, arrays)
    return {
        t.name: np.full([_size(e, dims) for e in t.shape], -np.inf if t.name == "lse" else 0.0)
        for t in attention.outputs
    }


def bind(attention: Attention, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Returns the value of every dimension, solved from the shapes; ValueError where two shapes disagree.

    A size that nothing determines (G when Hkv is 0, N of pages) is 1. B, M, N, H and Dv are always there.
    """
    equations = []
    for tensor in attention.inputs:
        if tensor.name not in arrays:
            continue
        paged = tensor.storage.is_paged
        roles = tensor.roles or (None,) * len(tensor.shape)
        for expr, size, role in zip(tensor.shape, arrays[tensor.name].shape, roles, strict=True):
            if not (paged and role in (Role.BATCH, Role.KEY)):
                equations.append((expr, size, tensor.name))
        if isinstance(tensor.storage, Paged):
            capacity_of = arrays[tensor.storage.block_table].shape[1] * tensor.storage.page
            equations.append((tensor.size(Role.KEY), capacity_of, tensor.name))
    dims: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for expr, size, name in equations:
            unknown = {node.name for node in walk(expr) if isinstance(node, Dim)} - dims.keys()
            if len(unknown) == 1 and (value := _solve(expr, dims, unknown.copy().pop(), size)) is not None:
                dims[unknown.pop()] = value
                progress = True
            elif not unknown and _size(expr, dims) != size:
                raise ValueError(f"'{name}' has an axis of {size}; other inputs make it {_size(expr, dims)}")
    for node in (node for tensor in attention.inputs for expr in tensor.shape for node in walk(expr)):
        if isinstance(node, Dim):
            dims.setdefault(node.name, 1)
    for name, tensor, role in (
        ("B", attention.q, Role.BATCH),
        ("M", attention.q, Role.QUERY),
        ("N", attention.k, Role.KEY),
        ("H", attention.q, Role.HEAD),
        ("Hkv", attention.k, Role.HEAD),
        ("Dv", attention.o, Role.FEATURE),
    ):
        axis = tensor.axis(role)
        if name not in dims:
            dims[name] = 1 if axis is None else _size(tensor.shape[axis], dims)
    return dims


def _size(expr: Expr, dims: Mapping[str, int]) -> int:
    return int(evaluate(expr, Env(dims=dims)).item())


def _solve(expr: Expr, dims: Mapping[str, int], name: str, size: int) -> int | None:
    """Returns the value of the one unknown of a shape, which is affine in it; None if every value fits."""
    at_zero, at_one = (_size(expr, {**dims, name: value}) for value in (0, 1))
    if at_one == at_zero:
        return None
    value, rest = divmod(size - at_zero, at_one - at_zero)
    if rest:
        raise ValueError(f"no {name} makes an axis of size {size}")
    return value


def capacity(k: Tensor, arrays: Mapping[str, Array], b: int) -> int:
    """Returns the rows that memory has for the keys of sequence b, before a `length` shortens it."""
    match k.storage:
        case Paged(block_table=table, page=page):
            return int(arrays[table].shape[1]) * page
        case _:
            return len(rows(k, arrays, b))


def rows(tensor: Tensor, arrays: Mapping[str, Array], b: int, stop: int | None = None) -> Array:
    """Returns rows 0 .. stop - 1 (None: all) of sequence b of q, k, v or an output as [rows, heads,
    features].

    A view, except of pages; table entries of pages from `stop` on are not looked at. An axis that the tensor
    lacks has size 1.
    """
    array, roles = arrays[tensor.name], list(tensor.roles)
    match tensor.storage:
        case Paged(block_table=table, page=page):
            needed = arrays[table][b] if stop is None else arrays[table][b, : -(-stop // page)]
            pages = np.moveaxis(array, roles.index(Role.BATCH), 0)[needed.astype(np.int64)]
            roles.remove(Role.BATCH)
            at = roles.index(Role.KEY)
            array = np.moveaxis(pages, 0, at)
            array = array.reshape(*array.shape[:at], len(pages) * page, *array.shape[at + 2 :])
        case Ragged(cu_seqlens=ends):
            at = next(axis for axis, role in enumerate(roles) if role in (Role.QUERY, Role.KEY))
            start, stop = (int(end) for end in arrays[ends][b : b + 2])
            array = array[(slice(None),) * at + (slice(start, stop),)]
        case _:
            if Role.BATCH in roles:
                array = array[(slice(None),) * roles.index(Role.BATCH) + (b,)]
                roles.remove(Role.BATCH)
    wanted = (Role.KEY if Role.KEY in roles else Role.QUERY, Role.HEAD, Role.FEATURE)
    present = array.transpose([roles.index(role) for role in wanted if role in roles])
    return np.expand_dims(present, tuple(axis for axis, role in enumerate(wanted) if role not in roles))[
        :stop
    ]


@contextmanager
def own_rows(
    tensor: Tensor, arrays: Mapping[str, Array], b: int, stop: int, combine: np.ufunc = np.add
) -> Iterator[Array]:
    """Yields rows 0 .. stop - 1 of sequence b as `rows` has them, to be written to. Of pages these are zeros,
    or NaN for `np.fmax`, and what becomes of them is combined with each page that the table names, once for
    each time that it does.
    """
    if not isinstance(tensor.storage, Paged):
        yield rows(tensor, arrays, b, stop)
        return
    page, array, roles = tensor.storage.page, arrays[tensor.name], tensor.roles
    table = arrays[tensor.storage.block_table][b, : -(-stop // page)].astype(np.int64)
    order = [roles.index(role) for role in (Role.BATCH, Role.KEY, Role.HEAD, Role.FEATURE)]
    pages = array.transpose(order)
    made = np.full((len(table), *pages.shape[1:]), 0.0 if combine is np.add else np.nan)
    yield made.reshape(-1, *pages.shape[2:])[:stop]
    combine.at(pages, table, made)


def count_sharing(tensor: Tensor, arrays: Mapping[str, Array], keys: Mapping[int, int]) -> int:
    """Returns how often a page is named at most; 1 where there are no pages. keys: of each sequence."""
    if not isinstance(tensor.storage, Paged):
        return 1
    page, table = tensor.storage.page, arrays[tensor.storage.block_table]
    named = [entry for b, count in keys.items() for entry in table[b, : -(-count // page)].tolist()]
    return max(Counter(named).values(), default=1)


# --- the reference ------------------------------------------------------------------------------------------


Words: TypeAlias = npt.NDArray[np.uint64]


#: Scores held at once, in float64.
SCORES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Head:
    """Some rows of a query head: q [M, D], k [N, D], v [N, Dv], in float64, and what the scores read.

    `first` is the q_idx of the first row: long sequences come in pieces, to bound the memory for M x N.
    tiny: which keys [N] have a scale of columns that kernels may take for 0.
    """

    attention: Attention
    b: int
    h: int
    first: int
    q: Floats
    k: Floats
    v: Floats
    dims: Mapping[str, int]
    arrays: Mapping[str, Array]
    tiny: Bools | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q), len(self.k)

    @property
    def indices(self) -> dict[str, Integers]:
        m, n = self.shape
        q_idx, kv_idx = self.first + np.arange(m)[:, None], np.arange(n)[None, :]
        columns = np.arange(self.v.shape[1])[None, :]
        coordinates = {"b": self.b, "h": self.h, "q_idx": q_idx, "kv_idx": kv_idx, COLUMN: columns}
        return {name: np.asarray(value, dtype=np.int64) for name, value in coordinates.items()}

    def value(self, expr: Expr, dot: Floats | None = None) -> Array:
        """Returns the expression as an array that broadcasts to [M, N]; `dot` is [M, N]. Of an epilogue,
        both are [M, Dv], and `dot` is the attention.
        """
        return evaluate(expr, Env(indices=self.indices, dims=self.dims, tensors=self.arrays, dot=dot))

    @cached_property
    def visible(self) -> Bools:
        return np.broadcast_to(self.value(self.attention.mask).astype(np.bool_), self.shape)

    @cached_property
    def weights(self) -> Floats:
        with np.errstate(all="ignore"):
            weight = self.value(self.attention.score, self.q @ self.k.T).astype(np.float64)
        return np.where(self.visible, weight, 0.0)

    @cached_property
    def scores(self) -> Floats:
        with np.errstate(all="ignore"):
            score = self.value(self.attention.score, self.q @ self.k.T).astype(np.float64)
        return np.where(self.visible, score, -np.inf)

    def place(self, output: Tensor, outputs: Mapping[str, Array]) -> Array:
        """Returns a view of this piece's rows in an output: [M, Dv] of o, [M, 1] of lse."""
        view = rows(output, {**self.arrays, **outputs}, self.b)
        return view[self.first : self.first + len(self.q), self.h]

    @cached_property
    def sink(self) -> float:
        sink = self.attention.softmax.sink
        return -np.inf if sink is None else float(self.value(sink).item())

    @cached_property
    def v_scale(self) -> Floats:
        softmax = self.attention.softmax
        value = np.float64(1) if softmax.of_rows is None else self.value(softmax.of_rows)
        return np.broadcast_to(value.astype(np.float64), (self.shape[0], 1))

    @cached_property
    def key_scale(self) -> Floats:
        """[M, N], or what broadcasts to it: the scale of v for each key, 1 where the spec has none of the
        kind.
        """
        softmax = self.attention.softmax
        if softmax.v_scale is None or not softmax.scales_keys:
            return np.ones((1, 1))
        with np.errstate(all="ignore"):
            return np.atleast_2d(self.value(softmax.v_scale).astype(np.float64))

    @cached_property
    def dropout(self) -> tuple[float, Bools]:
        """(p, keep [M, N]); (0, all true) without dropout."""
        softmax = self.attention.softmax
        if softmax.dropout is None or softmax.seed is None:
            return 0.0, np.ones(self.shape, dtype=np.bool_)
        p, seed = np.float32(self.value(softmax.dropout).item()), int(self.value(softmax.seed).item())
        first = 0 if softmax.first_head is None else int(self.value(softmax.first_head).item())
        at = self.indices
        return float(p), keep(seed, self.b, self.h + first, at["q_idx"], at["kv_idx"], float(p))


def reference(attention: Attention, tensors: Mapping[str, Input]) -> dict[str, Floats]:
    """Returns the outputs of a variant's attention (no Param left in it), by name, float64, in the declared
    layout.

    `tensors` has every input: an array, a torch tensor, or a number where the input is a scalar.
    ValueError if shapes disagree.
    """
    arrays = to_arrays(attention, tensors)
    outputs = empty_outputs(attention, arrays)
    for head in heads(attention, arrays):
        attended, lse = softmax(head)
        o = finish(head, attended)
        head.place(attention.o, outputs)[...] = o
        if attention.lse is not None:
            head.place(attention.lse, outputs)[..., 0] = lse
    return outputs


def finish(head: Head, attended: Floats) -> Floats:
    """Returns o [M, Dv] of one head, from the attention."""
    epilogue = head.attention.epilogue
    if epilogue is None:
        return attended
    with np.errstate(all="ignore"):
        return np.broadcast_to(head.value(epilogue, attended), attended.shape).astype(np.float64)


def value_rows(attention: Attention, arrays: Mapping[str, Array], b: int, stop: int | None = None) -> Array:
    """Returns `rows` of v, which may be the first columns of those of k."""
    if not attention.v.storage.is_part:
        return rows(attention.v, arrays, b, stop)
    columns = _size(attention.v.size(Role.FEATURE), {})
    return rows(attention.k, arrays, b, stop)[..., :columns]


def softmax(head: Head) -> tuple[Floats, Floats]:
    """Returns (the attention [M, Dv], lse [M]) of one head; without a normalization lse is 0."""
    if head.attention.softmax.form == "none":
        return weigh(head), np.zeros(head.shape[0])
    o, lse = compute_unscaled(head)
    with np.errstate(all="ignore"):
        return o * head.v_scale, lse


def weigh(head: Head) -> Floats:
    """Returns the weighted sum of the values [M, Dv], where nothing is normalised."""
    return _weighted_values(head, head.weights)


def _weighted_values(head: Head, weights: Floats) -> Floats:
    with np.errstate(all="ignore"):
        finite = np.isfinite(head.v)
        o = weights @ np.where(finite, head.v, 0.0)
        for j in np.flatnonzero(~finite.all(axis=1)):  # 0 * inf is NaN, unless the key is masked
            special = np.where(finite[j], 0.0, head.v[j])
            o += np.where(head.visible[:, j, None], weights[:, j, None] * special, 0.0)
    return np.asarray(o)


def compute_unscaled(head: Head) -> tuple[Floats, Floats]:
    """Returns `softmax` without the scale of v that a row has."""
    form = head.attention.softmax.form
    if form in WEIGHTS:
        weights, lse = WEIGHTS[form](head.scores, head.visible)
        o = _weighted_values(head, weights)
        o[np.isnan(lse)] = np.nan
        return o, lse
    scores, sink, (p, kept) = head.scores, head.sink, head.dropout
    with np.errstate(all="ignore"):
        m = np.fmax(scores.max(axis=1, initial=-np.inf), sink)
        shift = np.where(np.isneginf(m), 0.0, m)
        weights = np.exp(scores - shift[:, None])
        total = weights.sum(axis=1) + np.exp(sink - shift)
        lse = np.log(total) + shift
        probabilities = weights / np.where(total == 0, 1.0, total)[:, None]
        probabilities = np.where(kept, probabilities / (1 - p), 0.0)
        probabilities = probabilities * np.where(np.isneginf(scores), 0.0, head.key_scale)
        finite = np.isfinite(head.v)
        o = probabilities @ np.where(finite, head.v, 0.0)
        for j in np.flatnonzero(~finite.all(axis=1)):  # 0 * inf is NaN, unless the key is masked
            special = np.where(finite[j], 0.0, head.v[j])
            o += np.where(np.isneginf(scores[:, j, None]), 0.0, probabilities[:, j, None] * special)
        o[np.isnan(lse)] = np.nan  # even if every key is dropped
    return o, lse


def pick(scores: Floats, visible: Bools) -> tuple[Floats, Floats]:
    """Returns the weights [M, N] of softpick and the logarithm of its denominator [M], of scores and of
    which of them are visible: max(exp(s) - 1, 0) / (EPSILON + sum |exp(s) - 1|).

    arXiv 2504.20966, equation 4.
    """
    with np.errstate(all="ignore"):
        m = np.maximum(np.where(visible, scores, 0.0).max(axis=1, initial=0.0, keepdims=True), 0.0)
        exact = np.expm1(scores) * np.exp(-m)  # of small ones
        terms = np.where(np.abs(scores) < 1, exact, np.exp(scores - m) - np.exp(-m))
        terms = np.where(visible, terms, 0.0)
        total = np.abs(terms).sum(axis=1) + EPSILON * np.exp(-m[:, 0])
        return np.maximum(terms, 0.0) / total[:, None], np.log(total) + m[:, 0]


def break_sticks(scores: Floats, visible: Bools) -> tuple[Floats, Floats]:
    """Returns the weights [M, N] of stick-breaking and the logarithm of what is left of a row's stick [M], of
    scores and of which of them are visible: sigmoid(s_j) prod_{k > j} (1 - sigmoid(s_k)).

    arXiv 2410.17980, equation 2, for any order of visible keys, the last one first.
    """
    with np.errstate(all="ignore"):
        left = np.where(visible, np.logaddexp(0.0, scores), 0.0)  # -log(1 - sigmoid)
        behind = np.cumsum(left[:, ::-1], axis=1)[:, ::-1]
        weights = np.where(visible, np.exp(scores - behind), 0.0)
        return weights, -left.sum(axis=1)


#: Weights and lse of scores, and of which of them are visible, by form.
WEIGHTS: Mapping[Form, Callable[[Floats, Bools], tuple[Floats, Floats]]] = {
    "softpick": pick,
    "stick_breaking": break_sticks,
}


def heads(attention: Attention, arrays: Mapping[str, Array]) -> Iterator[Head]:
    """Yields every query head of every sequence, in pieces of rows."""
    shape = bind(attention, arrays)
    for b in range(shape["B"]):
        q = rows(attention.q, arrays, b).astype(np.float64)
        dims = {**shape, "M": len(q), "N": capacity(attention.k, arrays, b)}
        for name, length in attention.lengths.items():
            at_b = {"b": np.asarray(b, dtype=np.int64)}
            given = int(evaluate(length, Env(indices=at_b, dims=dims, tensors=arrays)).item())
            dims[name] = min(max(given, 0), dims[name])
        k = rows(attention.k, arrays, b, dims["N"]).astype(np.float64)
        v = value_rows(attention, arrays, b, dims["N"]).astype(np.float64)
        group = max(q.shape[1] // max(k.shape[1], 1), 1)
        for h in range(q.shape[1]):
            at = Env(indices={"b": np.asarray(b), "h": np.asarray(h)}, dims=dims, tensors=arrays)
            keys, tiny = _scale_columns(attention, "k", k[:, h // group], at)
            keys = _join_rest(attention, keys, q.shape[-1], at)
            values, also_tiny = _scale_columns(attention, "v", v[:, h // group], at)
            if attention.joins_values:
                values = keys[:, : _size(attention.v.size(Role.FEATURE), {})]
            step = max(SCORES_AT_ONCE // max(dims["N"], 1), 1)
            for first in range(0, dims["M"], step):
                piece = q[first : min(first + step, dims["M"]), h]
                yield Head(attention, b, h, first, piece, keys, values, dims, arrays, tiny | also_tiny)


def _scale_columns(attention: Attention, name: str, stored: Floats, at: Env) -> tuple[Floats, Bools]:
    """Returns rows of k or v [N, D] times the scale of their columns, if they have one: in float32, and
    rounded to the type of q. And which rows [N] have a scale that is no normal number of float32.
    """
    scale = attention.column_scales.get(name)
    if scale is None:
        return stored, np.zeros(len(stored), np.bool_)
    n, d = (np.arange(count, dtype=np.int64) for count in stored.shape)
    indices = {**at.indices, "kv_idx": n[:, None], COLUMN: d[None, :]}
    with np.errstate(all="ignore"):
        factor = evaluate(scale, replace(at, indices=indices))
        tiny = (np.abs(factor) < 2.0**-126) & (factor != 0)
        product = stored.astype(np.float32) * factor.astype(np.float32)
        match attention.element:
            case DType.BF16:
                product = bf16_to_f32(f32_to_bf16(product))
            case DType.F16:
                product = product.astype(np.float16)
    return product.astype(np.float64), np.asarray(np.broadcast_to(tiny, stored.shape).any(axis=1))


def _join_rest(attention: Attention, keys: Floats, columns: int, at: Env) -> Floats:
    rest = attention.k_rest
    if rest is None:
        return keys
    n, d = (np.arange(count, dtype=np.int64) for count in (len(keys), columns - keys.shape[1]))
    indices = {**at.indices, "kv_idx": n[:, None], COLUMN: d[None, :]}
    behind = evaluate(rest, replace(at, indices=indices)).astype(np.float64)
    return np.concatenate([keys, np.broadcast_to(behind, (len(keys), len(d)))], axis=1)


def keep(seed: int, b: int, h: int, q_idx: Integers, kv_idx: Integers, p: float) -> Bools:
    """Returns the dropout keep-mask, of 15 bits for each element, from philox(seed, (kv_idx // 16, q_idx, h,
    b)).

    Key i of sixteen has half i % 2, without its first bit, of word i // 4, turned left by 8 bits where
    i // 2 is odd. What is below 2^15 p is dropped; if p > 1/2, only what is below 2^15 (1 - p) is kept.
    These bounds are rounded to integers, in float32.
    """
    q_idx, kv_idx = np.broadcast_arrays(q_idx, kv_idx)
    counter = (kv_idx // 16, q_idx, np.full_like(q_idx, h), np.full_like(q_idx, b))
    words = np.stack(philox((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), counter), axis=-1)
    word = np.take_along_axis(words, (kv_idx % 16 // 4)[..., None], axis=-1)[..., 0]
    at = 16 * (kv_idx % 2) - 8 * (kv_idx // 2 % 2)  # the first of the 16 bits
    bits = ((word | word << np.uint64(32)) >> (at % 32).astype(np.uint64)) & np.uint64(0x7FFF)
    single = np.float32(p)
    drops_below = single <= 0.5
    share = single if drops_below else np.float32(1) - single
    return np.asarray((bits < np.floor(share * np.float32(32768) + np.float32(0.5))) != drops_below)


def philox(key: tuple[int, int], counter: tuple[Array, Array, Array, Array]) -> tuple[Words, ...]:
    """Returns Philox-4x32-7 (Salmon et al., SC 2011): four 32-bit words (in uint64) from a 64-bit key and a
    128-bit counter, low words first.

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word).astype(np.uint64) & low for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> half) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
