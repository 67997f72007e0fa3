"""The spec of a flash-attention call: which arguments it has, their types and layouts, but no values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Facts: TypeAlias = tuple[tuple[str, Any], ...]
Layout: TypeAlias = Literal["dense", "ragged", "paged"]

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """All that a kernel depends on.

    dtype: of q, k, v and o, as torch spells it; size, size_v: head dimensions of q and k, and of v
    q, kv: where rows are; page: rows of a page of keys
    lengths: of the keys of a sequence, an input i32[B] of that name, or "cu_seqlens_k" where that says only
        how many keys in pages there are; rows: of its queries likewise; leftpad: an input, keys hidden first
    causal, left, right: bounds of the mask; causal leaves no right
    scaled: softmax_scale is an input; without, it is 1 / sqrt(D)
    softcap, dropout, sink: whether there is one; slopes: 0, or the axes of alibi_slopes
    blocks: queries and keys of the blocks that lists name, None without lists; lists: "b", "h", "bh" or "",
        as sequences and query heads have lists of their own
    cap: a softcap and softmax_scale divided by it that the kernel has built in; without, they are inputs
    grads: inputs that get a gradient
    splits: of the keys of few queries, which then share a tile with their group: 0 for the device's choice,
        None for a kernel with tiles of query rows
    many: whether these are the queries of a chunk, whose tiles have more rows
    targets: whose kernel, the first that has one; Triton's where there are none. fast: gradients may be sums
        in any order. These four are no part of the text
    """

    dtype: str
    size: int
    size_v: int
    q: Layout = "dense"
    kv: Layout = "dense"
    page: int = 0
    lengths: str = ""
    rows: str = ""
    leftpad: str = ""
    causal: bool = False
    left: bool = False
    right: bool = False
    scaled: bool = False
    softcap: bool = False
    cap: tuple[float, float] | None = None
    dropout: bool = False
    sink: bool = False
    slopes: int = 0
    blocks: tuple[int, int] | None = None
    lists: str = ""
    grads: tuple[str, ...] = ()
    splits: int | None = None
    many: bool = False
    targets: tuple[str, ...] = ()
    fast: bool = False

    @property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        dtype, heads = _DTYPES[self.dtype], "Hkv * G"
        q = f"[B, M, {heads}, {self.size}]" if self.q == "dense" else f"[Tq, {heads}, {self.size}]"
        found = [("q", f"{dtype}{q}{' via ragged(cu_seqlens_q)' if self.q == 'ragged' else ''}")]
        found += [("k", f"{dtype}{self._keys(self.size)}"), ("v", f"{dtype}{self._keys(self.size_v)}")]
        if self.q == "ragged":
            found.append(("cu_seqlens_q", "i32[B + 1]"))
        if self.kv == "ragged" or self.lengths == "cu_seqlens_k":
            found.append(("cu_seqlens_k", "i32[B + 1]"))
        if self.kv == "paged":
            found.append(("block_table", "i32[B, P]"))
        named = (self.lengths if self.lengths != "cu_seqlens_k" else "", self.rows, self.leftpad)
        found += [(name, "i32[B]") for name in named if name]
        found += [(f"window_{side}", "i32[]") for side in ("left", "right") if getattr(self, side)]
        if (self.scaled or self.softcap) and self.cap is None:
            found.append(("softmax_scale", "f32[]"))
        if self.softcap and self.cap is None:
            found.append(("cap", "f32[]"))
        if self.slopes:
            found.append(("alibi_slopes", f"f32[{'B, ' if self.slopes == 2 else ''}{heads}]"))
        if self.sink:
            found.append(("s_aux", f"f32[{heads}]"))
        if self.dropout:
            found += [("dropout_p", "f32[]"), ("seed", "i64[]")]
        if self.blocks is not None:
            axes = [{"b": "B", "h": heads}[axis] for axis in self.lists]
            found.append(("blocks", f"i32[{', '.join((*axes, 'R', 'S'))}]"))
        return tuple(found)

    @property
    def text(self) -> str:
        statements = [*(f"input {name}: {written}" for name, written in self.inputs), *self._statements()]
        body = "\n  ".join(statements)
        return f"attention flash_attention {{\n  {body}\n}}\n"

    def _keys(self, size: int) -> str:
        if self.kv == "ragged":
            return f"[Tk, Hkv, {size}] via ragged(cu_seqlens_k)"
        paged = f" via paged(block_table, page = {self.page})" if self.kv == "paged" else ""
        return f"[B, N, Hkv, {size}]{paged}"

    def _statements(self) -> Iterator[str]:
        if self.lengths == "cu_seqlens_k":
            yield "length N = cu_seqlens_k[b + 1] - cu_seqlens_k[b]"
        elif self.lengths:
            yield f"length N = {self.lengths}[b]"
        if self.rows:
            yield f"length M = {self.rows}[b]"
        yield f"score = {self._score()}"
        if mask := " and ".join(self._mask()):
            yield f"mask = {mask}"
        arguments = ["sink = s_aux[h]"] * self.sink + ["dropout = dropout_p", "seed = seed"] * self.dropout
        yield f"normalize = softmax({', '.join(arguments)})" if arguments else "normalize = softmax"
        rows = "B, M" if self.q == "dense" else "Tq"
        yield f"output o: {_DTYPES[self.dtype]}[{rows}, Hkv * G, {self.size_v}]"
        yield f"output lse: f32[{'B, Hkv * G, M' if self.q == 'dense' else 'Hkv * G, Tq'}]"
        if self.grads:
            yield f"grad {', '.join(self.grads)}"

    def _score(self) -> str:
        cap, scale = ("cap", "softmax_scale") if self.cap is None else map(repr, self.cap)
        score = f"dot(q, k) * {scale}" if self.scaled or self.softcap else "dot(q, k) / sqrt(D)"
        if self.softcap:  # softmax_scale is divided by cap: one multiplication less for each score
            score = f"{cap} * tanh({score})"
        if self.slopes:
            slope = "alibi_slopes[b, h]" if self.slopes == 2 else "alibi_slopes[h]"
            score += f" - {slope} * abs(q_pos - kv_idx)"
        return score

    def _mask(self) -> Iterator[str]:
        if self.causal:
            yield "kv_idx <= q_pos"
        if self.right:
            yield "kv_idx <= q_pos + window_right"
        if self.left:
            yield "q_pos - window_left <= kv_idx"
        if self.leftpad:
            yield f"{self.leftpad}[b] <= kv_idx"
        if self.blocks is not None:
            rows, keys = self.blocks
            yield f"listed(blocks[{', '.join((*self.lists, f'q_idx // {rows}'))}], keys = {keys})"
