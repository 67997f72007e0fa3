"""Cases of PyTorch's own attention functions on attnc's kernels, judged as those of flash-attention are."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from tests.compat.flash_reference import Meaning, both, judge
from tests.pairs import Axes, Values

aten = torch.ops.aten
BOTH = (False, True)
SIZE = 32

SDPA: Axes = {
    "dtype": (torch.float16, torch.bfloat16),
    "heads": (1, 3),
    "shape": ((21, 37), (37, 21), (1, 37), (5, 5)),
    "order": ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)),
    "causal": BOTH,
    "scale": (None, 0.3),
    "dropout": (0.0, 0.3),
    "grads": BOTH,
}
#: Of PyTorch's operator, whose older releases have neither pages nor splits.
_ARGUMENTS = {argument.name for argument in aten._flash_attention_forward.default._schema.arguments}
#: aten::_flash_attention_forward.
FLASH: Axes = {
    "dtype": (torch.float16, torch.bfloat16),
    "heads": ((4, 4), (4, 2), (3, 1)),
    "shape": ((21, 37), (37, 21), (1, 37)),
    "packed": BOTH,
    "causal": BOTH,
    "window": ((None, None), (7, None), (-1, 3), (5, 2)),
    "scale": (None, 0.3),
    "used": BOTH,
    "alibi": (0, 1, 2),
    "page": (0, 16) if "block_table" in _ARGUMENTS else (0,),
    "splits": (None, 1, 3) if "num_splits" in _ARGUMENTS else (None,),
    "out": BOTH if hasattr(aten, "_flash_attention_forward_no_dropout_inplace") else (False,),
}
#: torch.nn.attention.varlen.varlen_attn.
VARLEN_ATTN: Axes = {
    "dtype": (torch.float16, torch.bfloat16),
    "heads": ((4, 4), (4, 2), (3, 1)),
    "shape": ((21, 37), (37, 21), (1, 37)),
    "window": ((-1, -1), (-1, 0), (7, 0), (4, 3)),
    "scale": (None, 0.3),
    "used": BOTH,
    "page": (0, 5, 16),
    "splits": (None, 1),
    "lse": BOTH,
    "grads": BOTH,
}


def fits(x: Values) -> bool:
    if x.get("page") and not (x["used"] and x.get("packed", True)):
        return False
    return not (x.get("grads") and (x.get("used") or x.get("page")))


def run_sdpa(x: Values) -> None:
    m, n = x["shape"]
    q, k, v = (_laid(2, x["heads"], rows, x) for rows in (m, n, n))
    torch.manual_seed(1)
    o, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, x["dropout"], x["causal"], scale=x["scale"]
    )
    meaning = Meaning(causal=x["causal"], scale=x["scale"], dropout=x["dropout"])
    turned = [y.transpose(1, 2) for y in (q, k, v)]
    if x["dropout"]:
        eye = torch.eye(n, dtype=x["dtype"]).expand(2, x["heads"], n, n)
        torch.manual_seed(1)
        p = aten._scaled_dot_product_flash_attention(q, k, eye, x["dropout"], x["causal"], scale=0.0)[0]
        seen = torch.ones(m, n, dtype=torch.bool).tril(n - m) if x["causal"] else torch.ones(m, n).bool()
        meaning = Meaning(causal=x["causal"], scale=x["scale"], dropout=x["dropout"], keep=(p > 0) | ~seen)
    right, plain = both(turned, meaning)
    judge("o", o.transpose(1, 2), right[0], plain[0])
    judge("lse", lse, right[1], plain[1])
    assert o.stride() == torch.empty_like(q).stride()
    if x["grads"]:
        outputs = (o, right[0].transpose(1, 2), plain[0].transpose(1, 2))
        _judge_gradients(outputs, (q, k, v))


def run_flash(x: Values) -> None:
    with torch.no_grad():
        data = _Sequences(x, packed=x["packed"])
        window = dict(zip(("window_size_left", "window_size_right"), x["window"], strict=True))
        options: dict[str, Any] = {"scale": x["scale"], **window, **data.tables}
        if x["splits"] is not None:
            options["num_splits"] = x["splits"]
        heads = x["heads"][0]
        slopes = torch.rand((3, heads) if x["alibi"] == 2 else heads) * 0.3
        if x["alibi"]:
            options["alibi_slopes"] = slopes
        arguments = (*data.tensors, *data.ends, *x["shape"], 0.0, x["causal"], False)
        if x["out"]:
            o = torch.full_like(data.tensors[0], torch.nan)
            lse = aten._flash_attention_forward_no_dropout_inplace(o, *arguments, **options)
        else:
            o, lse, *_ = aten._flash_attention_forward(*arguments, **options)
        left, right = (None if bound == -1 else bound for bound in x["window"])
        data.judge(
            o,
            lse,
            Meaning(
                causal=x["causal"],
                left=left,
                right=None if x["causal"] else right,
                scale=x["scale"],
                slopes=slopes if x["alibi"] else None,
            ),
        )


def run_varlen_attn(x: Values) -> None:
    data = _Sequences(x, packed=True)
    grouped = x["heads"][0] != x["heads"][1]
    arguments: tuple[Any, ...] = (*data.tensors, *data.ends, *x["shape"])
    made: Any = varlen_attn(
        *arguments,
        return_aux=AuxRequest(lse=True) if x["lse"] else None,
        scale=x["scale"],
        window_size=x["window"],
        enable_gqa=grouped,
        num_splits=x["splits"],
        **data.tables,
    )
    o, lse = made if x["lse"] else (made, None)
    left, right = (None if bound == -1 else bound for bound in x["window"])
    data.judge(o, lse, Meaning(causal=right == 0, left=left, right=right or None, scale=x["scale"]))


RUNS: dict[str, tuple[Axes, Callable[[Values], None]]] = {
    "sdpa": (SDPA, run_sdpa),
    "flash": (FLASH, run_flash),
    "varlen_attn": (VARLEN_ATTN, run_varlen_attn),
}


def run(call: str, x: Values) -> None:
    """Calls a function, and judges what it returns. AssertionError says what is wrong."""
    torch.manual_seed(zlib.crc32(repr((call, x)).encode()))
    RUNS[call][1](x)


def _laid(batch: int, heads: int, rows: int, x: Values) -> torch.Tensor:
    """A leaf [B, H, rows, D] whose axes lie in some order in memory."""
    order = x["order"]
    shape = (batch, heads, rows, SIZE)
    y = torch.empty([shape[axis] for axis in order], dtype=x["dtype"])
    y = y.permute([order.index(axis) for axis in range(4)])
    return y.copy_(torch.randn(shape)).requires_grad_(x["grads"])


def _judge_gradients(outputs: tuple[torch.Tensor, ...], leaves: tuple[torch.Tensor, ...]) -> None:
    do = torch.randn_like(outputs[1])
    sets = [torch.autograd.grad(y, leaves, do.to(y.dtype), allow_unused=False) for y in outputs]
    for name, got, exact, low in zip(("dq", "dk", "dv"), *sets, strict=True):
        judge(name, got, exact, low, rate=3.0)


class _Sequences:
    """Three sequences with lengths of their own, padded in the model, and as a function takes them."""

    def __init__(self, x: Values, *, packed: bool) -> None:
        (m, n), (heads, shared) = x["shape"], x["heads"]
        grads = x.get("grads", False)
        self.q = torch.randn(3, m, heads, SIZE).to(x["dtype"]).requires_grad_(grads)
        self.k, self.v = (
            torch.randn(3, n, shared, SIZE).to(x["dtype"]).requires_grad_(grads) for _ in range(2)
        )
        self.grads = grads
        self.rows, self.keys = (torch.full((3,), size, dtype=torch.int32) for size in (m, n))
        if packed:
            self.rows = torch.tensor([m, max(1, m // 3), m // 2], dtype=torch.int32)
            self.keys = torch.tensor([n // 2, n, max(1, n // 5)], dtype=torch.int32)
        self.kept = torch.arange(m) < self.rows[:, None]
        there = torch.arange(n) < self.keys[:, None]
        self.used = (torch.rand(3) * (self.keys + 1)).int() if x["used"] else self.keys
        self.tables: dict[str, Any] = {"seqused_k": self.used} if x["used"] else {}
        self.ends: list[torch.Tensor | None] = [None, None]
        self.tensors = [self.q, self.k, self.v]
        self.packed = packed
        if packed:
            self.ends = [_ends(self.rows), _ends(self.keys)]
            self.tensors = [self.q[self.kept], self.k[there], self.v[there]]
        if x["page"]:
            self.ends[1] = None
            self._store_pages(x["page"])

    def _store_pages(self, page: int) -> None:
        columns = -(-self.k.shape[1] // page)
        table = torch.randperm(3 * columns + 1)[: 3 * columns].view(3, columns)
        for i, x in enumerate((self.k, self.v), 1):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, columns * page - x.shape[1]), value=torch.nan)
            pool = torch.full((3 * columns + 1, page, *x.shape[2:]), torch.nan, dtype=x.dtype)
            pool[table] = padded.view(3, columns, page, *x.shape[2:])
            self.tensors[i] = pool
        self.tables["block_table"] = table.int()

    def judge(self, o: torch.Tensor, lse: torch.Tensor | None, meaning: Meaning) -> None:
        right, plain = both((self.q, self.k, self.v), meaning, lengths=self.used, rows=self.rows)
        if self.packed:
            o = torch.zeros_like(right[0]).index_put((self.kept,), o)
            right, plain = ((y[0], y[1].movedim(1, 2)[self.kept].mT) for y in (right, plain))
        judge("o", o, right[0], plain[0])
        if lse is not None:
            judge("lse", lse, right[1], plain[1])
        if self.grads:
            _judge_gradients((o, right[0], plain[0]), (self.q, self.k, self.v))


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
