"""Attentions whose masks read sorted inputs."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Expr, walk
from attnc.plan.ir import Statement, statement_expressions
from tests.targets import small_tiles
from tests.verify.judging import spec

SAME = "doc[b, q_pos] == doc[b, kv_idx]"

MASKS = (
    f"first(20) or {SAME}",
    f"window(30, 0) or {SAME}",
    "kv_idx < 4 or doc[b, kv_idx] >= 3",
    f"where(h % 2 == 0, {SAME}, kv_idx <= q_idx)",
    "doc[b, kv_idx] % 2 == doc[b, q_idx] % 2",
    f"q_idx < 4 or {SAME}",
    f"not ({SAME}) and kv_idx % 3 != 0",
    "ages[b, doc[b, kv_idx]] % 2 == ages[b, doc[b, q_pos]] % 2",
    "doc[doc[b, 9], kv_idx] == doc[b, q_pos] % 2 or kv_idx < 5",
)

LINES = (
    "input q: f16[B, M, H, 16]",
    "input k, v: f16[B, N, H, 16]",
    "input doc, ages: i32[B, N] is sorted",
    "score = dot(q, k) / 4",
    "normalize = softmax",
    "output o: f16[B, M, H, 16]",
)

ORDERS = {
    "rows": "loops = [q, kv]",
    "keys": "loops = [kv, q], softmax = online(rescale = every_step)",
    "decode": "loops = [kv], split.kv = 2",
    "gradients": "loops = [q, kv]",
}


def text_of(mask: str, order: str, target: str) -> str:
    grads = ("grad q, k, v",) if order == "gradients" else ()
    schedule = f"{ORDERS[order]}\n  {small_tiles(target)}"
    return spec((*LINES, f"mask = {mask}", *grads), schedule, target=target)


def nodes(item: Statement) -> Iterator[Expr]:
    return (node for expr in statement_expressions(item) for node in walk(expr))
