"""Attentions of papers and engines, as a user writes them, each beside the same in NumPy, written by hand.

The statements are a spec's; `rule` says score and mask of all queries and keys at once, from positions and
inputs, and shares nothing with the language: what `attnc` takes a statement to mean is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tests.verify.judging import spec

Array: TypeAlias = Any


@dataclass(slots=True)
class Scores:
    """What a rule is given: b, h, i, j index [B, H, M, N], p is i aligned at the end, s the product over
    sqrt(D); M, N, H, G and inputs by name.
    """

    b: Array
    h: Array
    i: Array
    j: Array
    s: Array
    M: int
    N: int
    H: int
    G: int
    inputs: Mapping[str, Array]

    @property
    def p(self) -> Array:
        return self.i + self.N - self.M

    @property
    def causal(self) -> Array:
        return self.j <= self.p

    @property
    def far(self) -> Array:
        """How far the key is behind the query."""
        return self.p - self.j

    def at(self, name: str, *index: Array) -> Array:
        """An input's elements, floats in float64, 0 outside of it."""
        tensor = self.inputs[name]
        tensor = tensor.astype(np.float64) if tensor.dtype.kind == "f" else tensor
        index = np.broadcast_arrays(*index)
        inside = np.logical_and.reduce([(x >= 0) & (x < n) for x, n in zip(index, tensor.shape, strict=True)])
        if not tensor.size:
            return np.zeros(index[0].shape, dtype=tensor.dtype)
        found = tensor[tuple(np.clip(x, 0, n - 1) for x, n in zip(index, tensor.shape, strict=True))]
        return np.where(inside, found, 0)


Rule: TypeAlias = Callable[[Scores], tuple[Array, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """rule: score and mask. inputs: declarations besides q, k and v; lets, defs: as in a spec; heads: of q,
    and of k and v; d, dv: columns; draws: inputs that must not be drawn at random, from the sizes; grad: what
    is differentiated by besides q, k and v; sink: of the softmax.
    """

    rule: Rule
    score: str = "dot(q, k) / sqrt(D)"
    mask: str = ""
    inputs: tuple[str, ...] = ()
    lets: tuple[str, ...] = ()
    defs: str = ""
    heads: tuple[str, str] = ("H", "H")
    d: int = 16
    dv: int = 16
    draws: Mapping[str, Callable[[Mapping[str, int]], Array]] = field(default_factory=dict)
    grad: str = ""
    sink: str = ""

    def text(self, schedule: str, target: str, dtype: str = "bf16") -> str:
        """A file with the attention, gradients and all, and a schedule."""
        heads, kv_heads = self.heads
        lines = [
            f"input q: {dtype}[B, M, {heads}, {self.d}]",
            f"input k: {dtype}[B, N, {kv_heads}, {self.d}]",
            f"input v: {dtype}[B, N, {kv_heads}, {self.dv}]",
            *(f"input {one}" for one in self.inputs),
            *(f"let {one}" for one in self.lets),
            f"score = {self.score}",
            *([f"mask = {self.mask}"] if self.mask else []),
            f"normalize = softmax{f'(sink = {self.sink})' if self.sink else ''}",
            f"output o: {dtype}[B, M, {heads}, {self.dv}]",
            f"grad q, k, v{f', {self.grad}' if self.grad else ''}",
        ]
        return self.defs + spec(lines, schedule, target=target)


def _same(name: str) -> Rule:
    return lambda x: (x.s, x.at(name, x.b, x.p) == x.at(name, x.b, x.j))


def _bucket(far: Array) -> Array:
    """T5's, with bounds where 8 buckets up to a distance of 15 have them."""
    return np.select([far < 4, far < 5, far < 7, far < 10], [far, 4, 5, 6], 7)


_BUCKET = "where(far < 4, far, where(far < 5, 4, where(far < 7, 5, where(far < 10, 6, 7))))"


def _tree(x: Scores) -> Array:
    """Drafts are a tree, of whose nodes each names its parent, up to three levels up."""
    draft, seen, node = x.j - (x.N - x.M), x.j < x.N - x.M, x.i
    for _ in range(4):
        seen = seen | (draft == node)
        node = x.at("parent", x.b, node)
    return seen


def _parents(dims: Mapping[str, int]) -> Array:
    """The root is its own parent."""
    return np.array([[max((i - 1) // 2, 0) for i in range(dims["M"])]] * dims["B"], dtype=np.int32).reshape(
        dims["B"], dims["M"]
    )


def _first(at: Array, size: int) -> Array:
    """The first of five neighbours, which stay inside."""
    return np.minimum(np.maximum(at - 2, 0), size - 5)


def _natten(x: Scores) -> Array:
    row, column = _first(x.p // 7, 7), _first(x.p % 7, 7)
    return (row <= x.j // 7) & (x.j // 7 < row + 5) & (column <= x.j % 7) & (x.j % 7 < column + 5)


def _diffusion(x: Scores) -> Array:
    """Block diffusion: a noisy copy sees its own block, and clean blocks before it; a clean one is causal."""
    half = x.N // 2
    q_noisy, kv_noisy = x.p < half, x.j < half
    q_block, kv_block = x.p % max(half, 1) // 8, x.j % max(half, 1) // 8
    return np.select(
        [q_noisy & kv_noisy, q_noisy & ~kv_noisy, ~q_noisy & ~kv_noisy],
        [q_block == kv_block, q_block > kv_block, q_block >= kv_block],
        False,
    )


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


PRACTICE: Mapping[str, Practice] = {
    "StreamingLLM": Practice(
        mask="causal and (kv_idx < 4 or q_pos - kv_idx < 9)",
        rule=lambda x: (x.s, x.causal & ((x.j < 4) | (x.far < 9))),
    ),
    "gpt-oss": Practice(
        inputs=("sink: f32[Hkv * G]",),
        heads=("Hkv * G", "Hkv"),
        mask="window(11, 0)",
        sink="sink[h]",
        grad="sink",
        rule=lambda x: (x.s, x.causal & (x.far <= 11)),
    ),
    "Gemma 2": Practice(
        score="softcap(dot(q, k) / sqrt(D), 5)",
        mask="window(20, 0)",
        rule=lambda x: (5 * np.tanh(x.s / 5), x.causal & (x.far <= 20)),
    ),
    "Llama 4": Practice(
        heads=("Hkv * G", "Hkv"),
        score="dot(q, k) / sqrt(D) * (1 + 0.1 * log(1 + q_pos // 16))",
        mask="causal and chunk(32)",
        rule=lambda x: (
            x.s * (1 + 0.1 * np.log(np.maximum(1 + x.p // 16, 1))),
            x.causal & (x.p // 32 == x.j // 32),
        ),
    ),
    "Longformer": Practice(
        inputs=("is_global: bool[B, N]",),
        mask="abs(q_pos - kv_idx) <= 6 or is_global[b, q_pos] or is_global[b, kv_idx]",
        rule=lambda x: (
            x.s,
            (np.abs(x.far) <= 6) | (x.at("is_global", x.b, x.p) != 0) | (x.at("is_global", x.b, x.j) != 0),
        ),
    ),
    "BigBird": Practice(
        inputs=("blocks: bool[H, X, Y]",),
        mask="blocks[h, q_idx // 8, kv_idx // 8] or kv_idx < 5 or q_idx < 5 or abs(q_pos - kv_idx) <= 9",
        rule=lambda x: (
            x.s,
            (x.at("blocks", x.h, x.i // 8, x.j // 8) != 0) | (x.j < 5) | (x.i < 5) | (np.abs(x.far) <= 9),
        ),
    ),
    "Sparse Transformer, strided": Practice(
        mask="causal and (q_pos - kv_idx < 8 or (q_pos - kv_idx) % 8 == 0)",
        rule=lambda x: (x.s, x.causal & ((x.far < 8) | (x.far % 8 == 0))),
    ),
    "Sparse Transformer, fixed": Practice(
        mask="causal and (kv_idx // 8 == q_pos // 8 or kv_idx % 8 >= 6)",
        rule=lambda x: (x.s, x.causal & ((x.j // 8 == x.p // 8) | (x.j % 8 >= 6))),
    ),
    "a tree of drafts, by parents": Practice(
        inputs=("parent: i32[B, M]",),
        lets=(
            "draft = kv_idx - (N - M)",
            "p1 = parent[b, q_idx]",
            "p2 = parent[b, p1]",
            "p3 = parent[b, p2]",
        ),
        mask="draft < 0 or draft == q_idx or draft == p1 or draft == p2 or draft == p3",
        draws={"parent": _parents},
        rule=lambda x: (x.s, _tree(x)),
    ),
    "a tree of drafts, by bits": Practice(
        inputs=("bits: i64[B, M]", "power: i64[X]"),
        mask="kv_idx < N - M or bits[b, q_idx] // power[kv_idx - (N - M)] % 2 == 1",
        draws={
            "bits": lambda dims: np.random.default_rng(1).integers(0, 1 << 62, (dims["B"], dims["M"])),
            "power": lambda dims: np.left_shift(1, np.minimum(np.arange(dims["X"]), 62), dtype=np.int64),
        },
        rule=lambda x: (
            x.s,
            (x.j < x.N - x.M)
            | (
                (x.j - x.N + x.M >= 0)
                & (x.j - x.N + x.M < len(x.inputs["power"]))
                & (x.at("bits", x.b, x.i) // np.maximum(x.at("power", x.j - x.N + x.M), 1) % 2 == 1)
            ),
        ),
    ),
    "documents": Practice(
        inputs=("doc: i32[B, N] is sorted",), mask="doc[b, q_pos] == doc[b, kv_idx]", rule=_same("doc")
    ),
    "documents, each with a prefix": Practice(
        inputs=("doc: i32[B, N] is sorted", "ends: i32[B, X]"),
        mask="doc[b, q_pos] == doc[b, kv_idx] and (causal or kv_idx < ends[b, doc[b, q_pos]])",
        rule=lambda x: (
            x.s,
            _same("doc")(x)[1] & (x.causal | (x.j < x.at("ends", x.b, x.at("doc", x.b, x.p)))),
        ),
    ),
    "documents with slopes": Practice(
        inputs=("doc: i32[B, N] is sorted", "slope: f32[H]"),
        score="dot(q, k) / sqrt(D) - slope[h] * (q_pos - kv_idx)",
        mask="causal and doc[b, q_pos] == doc[b, kv_idx]",
        grad="slope",
        rule=lambda x: (x.s - x.at("slope", x.h) * x.far, x.causal & _same("doc")(x)[1]),
    ),
    "T5": Practice(
        inputs=("table: f32[16, H]",),
        lets=("far = abs(kv_idx - q_pos)", f"bucket = {_BUCKET} + where(kv_idx > q_pos, 8, 0)"),
        score="dot(q, k) / sqrt(D) + table[bucket, h]",
        grad="table",
        rule=lambda x: (
            x.s + x.at("table", _bucket(np.abs(x.far)) + np.where(x.far < 0, 8, 0), x.h),
            True,
        ),
    ),
    "T5, a decoder": Practice(
        inputs=("table: bf16[H, 16]",),
        lets=("far = max(q_pos - kv_idx, 0)", f"bucket = {_BUCKET}"),
        score="dot(q, k) / sqrt(D) + table[h, bucket]",
        mask="causal",
        grad="table",
        rule=lambda x: (x.s + x.at("table", x.h, _bucket(np.maximum(x.far, 0))), x.causal),
    ),
    "Swin": Practice(
        inputs=("region: i32[W, N]", "bias: f32[H, X, N]"),
        score="dot(q, k) / sqrt(D) + bias[h, q_idx, kv_idx]",
        mask="region[b % W, q_idx] == region[b % W, kv_idx]",
        grad="bias",
        rule=lambda x: (
            x.s + x.at("bias", x.h, x.i, x.j),
            x.at("region", x.b % max(len(x.inputs["region"]), 1), x.i)
            == x.at("region", x.b % max(len(x.inputs["region"]), 1), x.j),
        ),
    ),
    "NATTEN": Practice(
        defs="def first_of(at, size) = clamp(at - 2, 0, size - 5)\n",
        lets=("row = first_of(q_pos // 7, 7)", "column = first_of(q_pos % 7, 7)"),
        mask="row <= kv_idx // 7 < row + 5 and column <= kv_idx % 7 < column + 5",
        rule=lambda x: (x.s, _natten(x)),
    ),
    "NATTEN, dilated": Practice(
        mask="neighborhood(9, 4) and (q_pos // 9 - kv_idx // 9) % 2 == 0"
        " and (q_pos % 9 - kv_idx % 9) % 2 == 0",
        rule=lambda x: (
            x.s,
            (np.abs(x.p // 9 - x.j // 9) <= 4)
            & (np.abs(x.p % 9 - x.j % 9) <= 4)
            & ((x.p // 9 - x.j // 9) % 2 == 0)
            & ((x.p % 9 - x.j % 9) % 2 == 0),
        ),
    ),
    "a window for each head": Practice(
        inputs=("reach: i32[H]",),
        mask="causal and q_pos - kv_idx < reach[h]",
        rule=lambda x: (x.s, x.causal & (x.far < x.at("reach", x.h))),
    ),
    "a rule for each head": Practice(
        mask="where(h % 2 == 0, window(5, 0), where(h == 1, dilated(3) and causal, causal))",
        rule=lambda x: (
            x.s,
            x.causal & np.where(x.h % 2 == 0, x.far <= 5, np.where(x.h == 1, x.far % 3 == 0, True)),
        ),
    ),
    "Forgetting Transformer": Practice(
        inputs=("c: f32[B, H, N]",),
        score="dot(q, k) / sqrt(D) + c[b, h, q_pos] - c[b, h, kv_idx]",
        mask="causal",
        grad="c",
        rule=lambda x: (x.s + x.at("c", x.b, x.h, x.p) - x.at("c", x.b, x.h, x.j), x.causal),
    ),
    "KERPLE": Practice(
        inputs=("r1: f32[H]",),
        score="dot(q, k) / sqrt(D) - r1[h] * log(1 + 0.5 * abs(q_pos - kv_idx))",
        mask="causal",
        grad="r1",
        rule=lambda x: (x.s - x.at("r1", x.h) * np.log(1 + 0.5 * np.abs(x.far)), x.causal),
    ),
    "images in text": Practice(
        inputs=("image: i32[B, N]",),
        mask="causal or image[b, q_pos] > 0 and image[b, q_pos] == image[b, kv_idx]",
        rule=lambda x: (x.s, x.causal | ((x.at("image", x.b, x.p) > 0) & _same("image")(x)[1])),
    ),
    "frames of a video": Practice(
        mask="q_pos // 12 >= kv_idx // 12", rule=lambda x: (x.s, x.p // 12 >= x.j // 12)
    ),
    "block diffusion": Practice(
        lets=(
            "half = N // 2",
            "q_noisy = q_pos < half",
            "kv_noisy = kv_idx < half",
            "q_block = q_pos % max(half, 1) // 8",
            "kv_block = kv_idx % max(half, 1) // 8",
        ),
        mask="q_noisy and kv_noisy and q_block == kv_block"
        " or q_noisy and not kv_noisy and q_block > kv_block"
        " or not q_noisy and not kv_noisy and q_block >= kv_block",
        rule=lambda x: (x.s, _diffusion(x)),
    ),
    "Reformer": Practice(
        inputs=("bucket: i32[B, H, N] is sorted",),
        score="where(q_pos == kv_idx, -100000, dot(q, k) / sqrt(D))",
        mask="bucket[b, h, q_pos] == bucket[b, h, kv_idx]",
        rule=lambda x: (
            np.where(x.far == 0, -1e5, x.s),
            x.at("bucket", x.b, x.h, x.p) == x.at("bucket", x.b, x.h, x.j),
        ),
    ),
    "zigzag positions": Practice(
        inputs=("q_at: i32[M]", "k_at: i32[N]"),
        mask="k_at[kv_idx] <= q_at[q_idx]",
        rule=lambda x: (x.s, x.at("k_at", x.j) <= x.at("q_at", x.i)),
    ),
    "ALiBi": Practice(
        score="dot(q, k) / sqrt(D) - exp2(-8 * (h + 1) / H) * abs(q_pos - kv_idx)",
        rule=lambda x: (x.s - 2.0 ** (-8 * (x.h + 1) / x.H) * np.abs(x.far), True),
    ),
    "a temperature for each head": Practice(
        inputs=("tau: f32[H]",),
        score="dot(q, k) / sqrt(D) * exp(min(tau[h], 1.5))",
        grad="tau",
        rule=lambda x: (x.s * np.exp(np.minimum(x.at("tau", x.h), 1.5)), True),
    ),
    "a sum with one more": Practice(mask="causal", sink="0", rule=lambda x: (x.s, x.causal)),
    "strictly before": Practice(mask="kv_idx < q_pos", rule=lambda x: (x.s, x.j < x.p)),
    "NSA, selected blocks": Practice(
        inputs=("selected: i32[B, Hkv, M, 3]",),
        heads=("Hkv * G", "Hkv"),
        lets=("here = kv_idx // 8",),
        mask="causal and (here == selected[b, h // G, q_idx, 0] or here == selected[b, h // G, q_idx, 1]"
        " or here == selected[b, h // G, q_idx, 2])",
        rule=lambda x: (
            x.s,
            x.causal
            & np.logical_or.reduce(
                [x.j // 8 == x.at("selected", x.b, x.h // x.G, x.i, np.array(n)) for n in range(3)]
            ),
        ),
    ),
    "MInference, vertical and slash": Practice(
        inputs=("vertical, slash: bool[H, N]",),
        mask="causal and (vertical[h, kv_idx] or slash[h, q_pos - kv_idx])",
        rule=lambda x: (
            x.s,
            x.causal & ((x.at("vertical", x.h, x.j) != 0) | (x.at("slash", x.h, x.far) != 0)),
        ),
    ),
    "padding on the left": Practice(
        inputs=("pad: i32[B]",),
        mask="causal and kv_idx >= pad[b]",
        rule=lambda x: (x.s, x.causal & (x.j >= x.at("pad", x.b))),
    ),
    "padding anywhere": Practice(
        inputs=("valid: bool[B, N]",),
        mask="valid[b, kv_idx] and valid[b, q_pos] and causal",
        rule=lambda x: (
            x.s,
            (x.at("valid", x.b, x.j) != 0) & (x.at("valid", x.b, x.p) != 0) & x.causal,
        ),
    ),
    "a prompt in chunks": Practice(
        inputs=("offset: i32[B]",),
        mask="kv_idx <= q_idx + offset[b]",
        rule=lambda x: (x.s, x.j <= x.i + x.at("offset", x.b).astype(np.int64)),
    ),
    "H2O": Practice(
        inputs=("at: i32[B, N]", "now: i32[B]"),
        mask="0 <= at[b, kv_idx] and at[b, kv_idx] <= now[b] + q_idx",
        rule=lambda x: (
            x.s,
            (x.at("at", x.b, x.j) >= 0) & (x.at("at", x.b, x.j) <= x.at("now", x.b).astype(np.int64) + x.i),
        ),
    ),
    "a learned gate": Practice(
        inputs=("gate: f32[B, H, N]",),
        score="dot(q, k) / sqrt(D) * sigmoid(gate[b, h, kv_idx]) + log(sigmoid(gate[b, h, kv_idx]))",
        mask="causal",
        grad="gate",
        rule=lambda x: (
            x.s * _sigmoid(x.at("gate", x.b, x.h, x.j)) + np.log(_sigmoid(x.at("gate", x.b, x.h, x.j))),
            x.causal,
        ),
    ),
    "a bias of pairs": Practice(
        inputs=("bias: bf16[B, H, M, N]",),
        score="dot(q, k) / sqrt(D) + bias[b, h, q_idx, kv_idx]",
        grad="bias",
        rule=lambda x: (x.s + x.at("bias", x.b, x.h, x.i, x.j), True),
    ),
    "distances, clipped": Practice(
        inputs=("table: f32[H, 15]",),
        score="dot(q, k) / sqrt(D) + table[h, clamp(q_pos - kv_idx, -7, 7) + 7]",
        grad="table",
        rule=lambda x: (x.s + x.at("table", x.h, np.clip(x.far, -7, 7) + 7), True),
    ),
    "differential, values twice as wide": Practice(mask="causal", dv=32, rule=lambda x: (x.s, x.causal)),
    "seven queries to a key": Practice(
        heads=("7 * Hkv", "Hkv"), mask="window(9, 4)", rule=lambda x: (x.s, (x.far >= -4) & (x.far <= 9))
    ),
    "80 columns": Practice(d=80, dv=80, mask="causal", rule=lambda x: (x.s, x.causal)),
    "112 columns": Practice(d=112, dv=112, mask="anticausal", rule=lambda x: (x.s, x.j >= x.p)),
}
