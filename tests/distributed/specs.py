"""Small attentions that split over ranks in different ways."""

from __future__ import annotations

from collections.abc import Mapping

_TEXT = """
attention small {{
  {params}
  input q: {dtype}[{q}]{q_via}
  input k, v: {dtype}[{k}]{k_via}
  {inputs}
  {length}
  score = {score}
  mask = {mask}
  normalize = {normalize}
  output o: {dtype}[{q}]
  output lse: f32[{lse}]
  grad q, k, v{grads}
}}
schedule small for triton {{
  tile.q = 16, tile.kv = 16
}}
"""


def text(
    mask: str = "causal",
    *,
    score: str = "dot(q, k) / sqrt(D)",
    inputs: tuple[str, ...] = (),
    normalize: str = "softmax",
    grads: str = "",
    dtype: str = "f32",
    heads: str = "Hkv * G",
    packed: bool = False,
    packed_keys: bool = False,
    length: str = "",
    params: str = "",
) -> str:
    """A spec with heads of 16 columns, keys and queries in rows or packed, or keys alone packed."""
    kv_heads = heads.partition(" ")[0]
    q, k = f"B, M, {heads}, 16", f"B, N, {kv_heads}, 16"
    q_via = k_via = ""
    if packed:
        q, q_via = f"T, {heads}, 16", " via ragged(cu_q)"
        inputs = (*inputs, "cu_q: i32[B + 1]")
    if packed or packed_keys:
        k, k_via = f"S, {kv_heads}, 16", " via ragged(cu_k)"
        inputs = (*inputs, "cu_k: i32[B + 1]")
    return _TEXT.format(
        params=params,
        dtype=dtype,
        q=q,
        q_via=q_via,
        k=k,
        k_via=k_via,
        inputs="\n  ".join(f"input {x}" for x in inputs),
        length=length,
        score=score,
        mask=mask,
        normalize=normalize,
        lse=f"T, {heads}" if packed else f"B, {heads}, M",
        grads=grads,
    )


SPECS: Mapping[str, str] = {
    "causal": text(),
    "bf16": text(dtype="bf16"),
    "window": text("window(20, 0)"),
    "documents": text("causal and doc[b, q_pos] == doc[b, kv_idx]", inputs=("doc: i32[B, N] is sorted",)),
    "prefix": text("prefix_lm(length_of[b])", inputs=("length_of: i32[B]",)),
    "sink": text(inputs=("sink: f32[Hkv * G]",), normalize="softmax(sink = sink[h])", grads=", sink"),
    "alibi": text(
        score="dot(q, k) / sqrt(D) - slope[h] * abs(q_pos - kv_idx)",
        inputs=("slope: f32[H]",),
        grads=", slope",
        heads="H",
    ),
    "bias": text(
        score="dot(q, k) / sqrt(D) + pair[h, q_idx, kv_idx] + own[b, kv_idx]",
        inputs=("pair: f32[H, M, N]", "own: f32[B, N]"),
        grads=", pair, own",
        heads="H",
    ),
    "distances": text(
        "abs(q_pos - kv_idx) < 24",
        score="dot(q, k) / sqrt(D) + table[h, q_pos - kv_idx + 31]",
        inputs=("table: f32[H, R]",),
        heads="H",
    ),
    "by head": text("causal and (h < 2 or kv_idx >= q_pos - 9)"),
    "sizes": text("kv_idx < N - 3 and kv_idx <= q_pos + M // 4"),
    "dropout": text(inputs=("p: f32[]", "seed: i64[]"), normalize="softmax(dropout = p, seed = seed)"),
    "types": text(params="param T in {f32, bf16}", dtype="T"),
    "lengths": text(inputs=("kv_len: i32[B]",), length="length N = kv_len[b]"),
    "packed": text("window(30, 0)", packed=True),
    "dilated": text("(q_pos - kv_idx) % 3 == 0 and causal"),
}
