"""Random masks and calls over ranks, and what each query of them sees, score by score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from attnc.distributed.spans import CallSizes, Visibility
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr
from tests.expr.masks import masks, tensors
from tests.expr.spell import spell
from tests.specimens import attention

KV_HEADS, GROUP = 2, 2
HEADS = KV_HEADS * GROUP


def visibility(mask: Expr, lengths: Mapping[str, Expr] | None = None) -> Visibility:
    return Visibility(attention(mask=mask, lengths=lengths or {}))


@dataclass(frozen=True)
class Call:
    """A mask and a call."""

    mask: Expr
    lengths: Mapping[str, Expr]
    sizes: CallSizes
    ranks: int

    def visible(self) -> npt.NDArray[np.bool_]:
        """[heads, queries, keys], for any sequence: what must be covered."""
        found = np.zeros((HEADS, self.sizes.queries, self.sizes.keys), np.bool_)
        for b in range(self.sizes.batch):
            for h in range(HEADS):
                rows, keys, seen = self.of_head(self.mask, b, h)
                found[h, rows, keys] |= seen
        return found

    def of_head(self, expr: Expr, b: int, h: int) -> tuple[slice, slice, npt.NDArray[Any]]:
        """The rows and keys of a sequence, as far as its lengths go, and what an expression is there."""
        sizes = self.sizes
        ends_q, ends_k = (
            (0, whole) if ends is None else ends[b : b + 2].tolist()
            for ends, whole in ((sizes.ends_q, sizes.queries), (sizes.ends_k, sizes.keys))
        )
        dims: dict[str, Any] = {
            "M": ends_q[1] - ends_q[0],
            "N": ends_k[1] - ends_k[0],
            "B": sizes.batch,
            "H": HEADS,
            "Hkv": KV_HEADS,
            "G": GROUP,
        }
        whole = dict(dims)
        for name, length in self.lengths.items():
            value = int(evaluate(length, Env(indices={"b": b}, tensors=sizes.tensors, dims=whole)))
            dims[name] = min(max(value, 0), whole[name])
        indices: dict[str, Any] = {
            "b": b,
            "h": h,
            "q_idx": np.arange(dims["M"])[:, None],
            "kv_idx": np.arange(dims["N"]),
        }
        dot = np.zeros((dims["M"], dims["N"]))
        env = Env(indices=indices, tensors=sizes.tensors, dims=dims, dot=dot)
        rows = slice(ends_q[0], ends_q[0] + dims["M"])
        keys = slice(ends_k[0], ends_k[0] + dims["N"])
        return rows, keys, np.broadcast_to(evaluate(expr, env), dot.shape)


@st.composite
def calls(draw: st.DrawFn, queries: tuple[int, ...] = (1, 15, 16, 33, 70, 97, 130)) -> Call:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ranks = draw(st.integers(1, 5))
    batch = draw(st.integers(1, 3))
    kinds = (
        "square",
        "square",
        "oblong",
        "packed",
        "packed apart",
        "packed keys",
        "lengths",
        "both lengths",
    )
    kind = draw(st.sampled_from(kinds))
    rows = draw(st.sampled_from(queries))
    keys = rows if kind in ("square", "packed") else draw(st.sampled_from((0, 1, 16, 47, 101, 128)))
    ends_q = ends_k = None
    if kind.startswith("packed"):
        ends_q = np.sort(np.append(rng.integers(0, rows + 1, batch - 1), [0, rows]))
        ends_k = ends_q
        if kind != "packed":
            ends_k = np.sort(np.append(rng.integers(0, keys + 1, batch - 1), [0, keys]))
        if kind == "packed keys":
            ends_q = None
    longest = max(keys, 1)
    lengths = {"N": spell("kv_len[b]")} if kind.endswith("lengths") else {}
    if kind == "both lengths":
        lengths["M"] = spell("prefix[b] + 1")
    sizes = CallSizes(
        batch=batch,
        queries=rows,
        keys=keys,
        heads=HEADS,
        kv_heads=KV_HEADS,
        ends_q=ends_q,
        ends_k=ends_k,
        tensors=tensors(rng, batch, HEADS, max(rows, 1), longest),
    )
    mask = draw(st.one_of(masks(), st.sampled_from(USUAL)))
    return Call(mask=mask, lengths=lengths, sizes=sizes, ranks=ranks)


USUAL = tuple(
    spell(text)
    for text in (
        "kv_idx <= q_pos",
        "q_pos - 20 <= kv_idx and kv_idx <= q_pos",
        "kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]",
        "kv_idx <= q_pos or kv_idx < prefix[b]",
        "q_pos // 24 == kv_idx // 24",
        "(q_pos - kv_idx) % 40 == 0 and kv_idx <= q_pos",
        "q_pos - width[h] <= kv_idx and kv_idx <= q_pos",
        "kv_idx == kv_idx",
    )
)
