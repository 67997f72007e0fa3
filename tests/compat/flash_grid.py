"""Cases of flash-attention's functions: what is called, with what, and what must come out.

The dimensions are those of flash-attention's own tests (tests/test_flash_attn.py of its repository): heads,
masks, windows, biases, dropout, head sizes, pairs of lengths, caches. All data follow from the case.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnc.compat import flash_attn
from attnc.reference import keep
from tests.compat.flash_reference import Meaning, attend, judge

Make = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """heads: of q and of k. local: a window with random bounds. page: rows of a page, 0 for a plain cache.

    used: rows of packed sequences beyond `seqused_q` and `seqused_k` do not count. empty: one has no keys.
    new: rows that are appended to the cache first; joined: end to end, some for each sequence, and some
    behind the last. chosen: sequences are rows of a larger cache. lengths: how `cache_seqlens` is given.
    rotary: the share of columns that are rotated, by pairs that are interleaved or not; own_angles: at
    positions of their own. strided: tensors lie in another order. out: where o goes is given.
    """

    call: str = "dense"
    dtype: torch.dtype = torch.float16
    size: int = 64
    size_v: int = 0
    heads: tuple[int, int] = (4, 4)
    rows: int = 113
    keys: int = 203
    batch: int = 2
    causal: bool = False
    local: bool = False
    softcap: float = 0.0
    scale: float | None = None
    alibi: int = 0
    sink: bool = False
    dropout: float = 0.0
    grads: bool = False
    page: int = 0
    leftpad: bool = False
    new: int = 0
    chosen: bool = False
    ragged: bool = False
    used: bool = False
    empty: bool = False
    joined: bool = False
    lengths: str = "tensor"
    rotary: float = 0.0
    interleaved: bool = True
    own_angles: bool = False
    splits: int = 0
    strided: bool = False
    out: bool = False

    def __str__(self) -> str:
        written = [self.call, str(self.dtype).removeprefix("torch."), f"d{self.size}"]
        written += [f"{self.rows}x{self.keys}", "h{}_{}".format(*self.heads)]
        flags = ["causal", "local", "sink", "grads", "leftpad", "chosen", "ragged", "used", "empty", "joined"]
        flags += ["own_angles", "strided", "out"]
        written += [flag for flag in flags if getattr(self, flag)]
        written += ["pairs_apart"] * (not self.interleaved) + [self.lengths] * (self.lengths != "tensor")
        numbers = ("size_v", "softcap", "scale", "alibi", "dropout", "page", "new", "rotary", "splits")
        written += [f"{name}{value:g}" for name in numbers if (value := getattr(self, name))]
        return "-".join(written)


def run(case: Case, device: torch.device) -> None:
    """Calls the function, and judges all that it returns and writes. AssertionError says what is wrong."""
    torch.manual_seed(zlib.crc32(str(case).encode()))
    {"dense": _dense, "varlen": _varlen, "cache": _cache}[case.call](case, device)


def _dense(case: Case, device: torch.device) -> None:
    q, k, v = _inputs(case, device)
    meaning, options = _meaning(case, device)
    seed = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    options |= _out(case, [case.batch, case.rows], q)
    o, lse = flash_attn.flash_attn_func(q, k, v, return_lse=True, **options)
    meaning = _dropped(case, meaning, seed, device)
    right, plain = (attend(q, k, v, meaning, low=low) for low in (False, True))
    judge("o", o, right[0], plain[0])
    judge("lse", lse, right[1], plain[1])
    if case.grads:
        _judge_gradients((q, k, v), meaning, o, right[0], plain[0])


def _varlen(case: Case, device: torch.device) -> None:
    q, k, v = _inputs(case, device)
    meaning, options = _meaning(case, device)
    rows, lengths = (_some(case, limit, device) for limit in (case.rows, case.keys))
    if case.empty:
        lengths[-1] = 0
    kept_q = torch.arange(case.rows, device=device) < rows[:, None]
    kept_k = torch.arange(case.keys, device=device) < lengths[:, None]
    packed: list[Any] = [q[kept_q], k[kept_k], v[kept_k], _ends(rows), _ends(lengths), case.rows, case.keys]
    used_q, used_k = rows, lengths
    if case.used:
        used_q, used_k = ((torch.rand(case.batch, device=device) * (x + 1)).int() for x in (rows, lengths))
        options |= {"seqused_q": used_q}
    if case.page:
        pools, table = _pages(case, (k, v), used_k)
        packed[1:3] = pools
        options |= {"block_table": table}
        if case.used:
            packed[4] = None
    if case.used:
        options |= {"seqused_k": used_k}
    options |= _out(case, [len(packed[0])], q)
    seed = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    got, lse = flash_attn.flash_attn_varlen_func(*packed, return_lse=True, **options)
    meaning = _dropped(case, meaning, seed, device)
    right, plain = (attend(q, k, v, meaning, lengths=used_k, rows=used_q, low=low) for low in (False, True))
    o = torch.zeros_like(right[0]).index_put((kept_q,), got)
    judge("o", o, right[0].masked_fill(~kept_q[..., None, None], 0), plain[0])
    exact, low = (x[1].movedim(1, 2)[kept_q].mT for x in (right, plain))
    judge("lse", lse, exact, low)
    if case.grads:
        _judge_gradients((q, k, v), meaning, o, right[0], plain[0])


def _cache(case: Case, device: torch.device) -> None:
    q, k, v = _inputs(case, device)
    meaning, options = _meaning(case, device)
    lengths = _lengths(case, device)
    leftpad = (torch.rand(case.batch, device=device) * lengths).int() if case.leftpad else None
    added = torch.full_like(lengths, case.new)
    if case.joined:
        added = torch.randint(0, case.new + 1, (case.batch,), device=device, dtype=torch.int32)
    total = lengths + added
    index = torch.arange(case.keys, device=device)
    there = index < total[:, None]
    if leftpad is not None:
        there &= index >= leftpad[:, None]
    fresh = (index >= lengths[:, None]) & (index < total[:, None])
    rows = _some(case, case.rows, device) if case.ragged else torch.full_like(lengths, case.rows)
    given_q, given = q, {"k": k, "v": v}
    if case.rotary:
        q, k, angles = _rotated(case, q, k, lengths, meaning)
        options |= angles
    # What is not there is NaN: nothing of it may be seen.
    stored = [x.masked_fill(~(there & ~fresh)[..., None, None], torch.nan) for x in (k, v)]
    wanted = [torch.where(fresh[..., None, None], x, old) for x, old in zip((k, v), stored, strict=True)]
    k, v = (x.masked_fill(~there[..., None, None], 0) for x in (k, v))
    if case.new:
        options |= {name: _appended(case, x, fresh) for name, x in given.items()}
        options |= {"cu_seqlens_k_new": _ends(added)} if case.joined else {}
    table = chosen = None
    if case.page:
        stored, table = _pages(case, stored, torch.full_like(total, case.keys))
        options["block_table"] = table
    elif case.chosen:
        chosen = torch.randperm(2 * case.batch, device=device)[: case.batch]
        stored = [_spread(x, chosen) for x in stored]
        options["cache_batch_idx"] = chosen.int()
    if case.strided:
        stored = [_turned(x) for x in stored]
    kept = torch.arange(case.rows, device=device) < rows[:, None]
    seqlens = {"tensor": lengths, "number": case.keys - case.new, "none": None}[case.lengths]
    options |= {"cache_seqlens": seqlens, "cache_leftpad": leftpad, "num_splits": case.splits}
    options |= {"cu_seqlens_q": _ends(rows)} if case.ragged else {}
    passed = given_q[kept] if case.ragged else given_q
    options |= _out(case, list(passed.shape[:-2]), passed)
    with torch.no_grad():
        got, lse = flash_attn.flash_attn_with_kvcache(
            passed, stored[0], stored[1], return_softmax_lse=True, **options
        )
    for name, cache, x in zip(("k_cache", "v_cache"), stored, wanted, strict=True):
        if table is not None:
            cache = cache[table.long()].flatten(1, 2)[:, : case.keys]
        elif chosen is not None:
            cache = cache[chosen]
        exact = not case.rotary or name == "v_cache"
        tolerance = 0.0 if exact else torch.finfo(x.dtype).eps
        found, right_rows = (y.float().nan_to_num(77.0) for y in (cache, x))
        torch.testing.assert_close(
            found, right_rows, rtol=tolerance, atol=tolerance, msg=f"{name} after the call"
        )
    right, plain = (
        attend(q, k, v, meaning, lengths=total, leftpad=leftpad, rows=rows, low=low) for low in (False, True)
    )
    if case.ragged:
        right, plain = ((o[kept], x.movedim(1, 2)[kept].mT) for o, x in (right, plain))
    judge("o", got, right[0], plain[0])
    judge("lse", lse, right[1], plain[1])


def _lengths(case: Case, device: torch.device) -> torch.Tensor:
    """The keys that a cache has of each sequence."""
    if case.lengths != "tensor":
        return torch.full((case.batch,), case.keys - case.new, dtype=torch.int32, device=device)
    lengths = _some(case, case.keys - case.new, device)
    if case.empty:
        lengths[-1] = 0
    return lengths


def _appended(case: Case, x: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The new rows of k or v as the function takes them; with `joined` two behind the last, which are no
    one's.
    """
    rows = x[fresh]
    if case.joined:
        return torch.cat(
            (rows, torch.full_like(rows[:1], 9.0).repeat(2, 1, 1) if len(rows) else x[0, :2] + 9)
        )
    return rows.view(-1, case.new, *x.shape[2:])


def _rotated(
    case: Case, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, meaning: Meaning
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """q and k with their rows rotated, as complex numbers in float64, and the arguments that say so."""
    device = q.device
    half = int(case.size * case.rotary) // 2
    angle = torch.rand(case.keys + case.rows, half, device=device) * 2 * torch.pi
    cos, sin = (x.to(case.dtype) for x in (angle.cos(), angle.sin()))
    begins = lengths // 2 if case.own_angles else lengths
    walks = meaning.causal or meaning.left is not None or meaning.right is not None
    at_q = begins[:, None] + torch.arange(case.rows, device=device) * walks
    at_k = (begins - lengths)[:, None] + torch.arange(case.keys, device=device)
    turn = torch.complex(cos.double(), sin.double())
    turned = []
    for x, at in ((q, at_q), (k, at_k.clamp(min=0))):
        pairs = x[..., : 2 * half].double()
        pairs = pairs.reshape(*x.shape[:-1], *((half, 2) if case.interleaved else (2, half)))
        pairs = pairs if case.interleaved else pairs.mT
        made = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn[at.long()][:, :, None])
        made = made.flatten(-2) if case.interleaved else made.mT.flatten(-2)
        turned.append(torch.cat((made.to(case.dtype), x[..., 2 * half :]), -1))
    arguments = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.interleaved}
    arguments |= {"rotary_seqlens": begins.int()} if case.own_angles else {}
    return turned[0], turned[1], arguments


def _out(case: Case, rows: list[int], q: torch.Tensor) -> dict[str, torch.Tensor]:
    if not case.out:
        return {}
    shape = (*rows, case.heads[0], case.size_v or case.size)
    return {"out": torch.full(shape, torch.nan, dtype=q.dtype, device=q.device)}


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, heads outside of rows in memory."""
    return x.detach().transpose(-2, -3).contiguous().transpose(-2, -3)


def _inputs(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, heads_k = case.heads
    q = torch.randn(case.batch, case.rows, heads, case.size, device=device)
    if case.softcap:
        q = q * case.softcap / 4  # scores that it bends
    k = torch.randn(case.batch, case.keys, heads_k, case.size, device=device)
    v = torch.randn(case.batch, case.keys, heads_k, case.size_v or case.size, device=device)
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    if case.strided:
        q, k, v = map(_turned, (q, k, v))
    for x in (q, k, v):
        x.requires_grad_(case.grads)
    return q, k, v


def _meaning(case: Case, device: torch.device) -> tuple[Meaning, dict[str, Any]]:
    """The call's meaning, and the arguments that say it."""
    heads = case.heads[0]
    left, right = torch.randint(0, case.keys, (2,)).tolist() if case.local else (-1, -1)
    slopes = torch.rand((case.batch, heads) if case.alibi == 2 else heads, device=device) * 0.3
    sink = torch.randn(heads, device=device)
    meaning = Meaning(
        causal=case.causal,
        left=left if left >= 0 else None,
        right=right if right >= 0 and not case.causal else None,
        scale=case.scale,
        softcap=case.softcap,
        slopes=slopes if case.alibi else None,
        sink=sink if case.sink else None,
        dropout=case.dropout,
    )
    options = {
        "causal": case.causal,
        "window_size": (left, right),
        "softmax_scale": case.scale,
        "softcap": case.softcap,
        "alibi_slopes": meaning.slopes,
        "s_aux": meaning.sink,
    }
    return meaning, options if case.call == "cache" else options | {"dropout_p": case.dropout}


def _dropped(case: Case, meaning: Meaning, state: torch.Tensor, device: torch.device) -> Meaning:
    """With what the call has dropped: it draws its seed from torch's generator."""
    if not case.dropout:
        return meaning
    (torch.set_rng_state if device.type == "cpu" else torch.cuda.set_rng_state)(state)
    seed = int(torch.randint(1 << 62, (), device=device))
    q_idx, kv_idx = np.arange(case.rows)[:, None], np.arange(case.keys)[None, :]
    kept = [
        [keep(seed, b, h, q_idx, kv_idx, case.dropout) for h in range(case.heads[0])]
        for b in range(case.batch)
    ]
    return replace(meaning, keep=torch.from_numpy(np.array(kept)).to(device))


def _judge_gradients(
    leaves: tuple[torch.Tensor, ...],
    meaning: Meaning,
    o: torch.Tensor,
    right: torch.Tensor,
    plain: torch.Tensor,
) -> None:
    do = torch.randn_like(right)
    sets = [torch.autograd.grad(x, leaves, do.to(x.dtype)) for x in (o, right, plain)]
    for name, got, exact, low in zip(("dq", "dk", "dv"), *sets, strict=True):
        judge(name, got, exact, low, rate=3.0)


def _some(case: Case, limit: int, device: torch.device) -> torch.Tensor:
    """A length for each sequence, the longest among them."""
    lengths = torch.randint(max(1, limit // 3), limit + 1, (case.batch,), device=device, dtype=torch.int32)
    lengths[0] = limit
    return lengths


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _pages(case: Case, tensors: Any, lengths: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Pools of pages in a random order, and the table of them; entries beyond a sequence are far outside."""
    device, page = lengths.device, case.page
    columns = -(-case.keys // page)
    order = torch.randperm(case.batch * columns + 3, device=device)[: case.batch * columns]
    table = order.view(case.batch, columns).int()
    pools = []
    for x in tensors:
        pool = torch.full((len(order) + 3, page, *x.shape[2:]), torch.nan, dtype=x.dtype, device=device)
        padded = torch.nn.functional.pad(
            x.detach(), (0, 0, 0, 0, 0, columns * page - case.keys), value=torch.nan
        )
        pool[table.long()] = padded.view(len(x), columns, page, *x.shape[2:])
        pools.append(pool)
    used = torch.arange(columns, device=device) * page < lengths[:, None]
    return pools, torch.where(used, table, 1 << 20).int()


def _spread(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    larger = torch.full((2 * len(x), *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    larger[places] = x.detach()
    return larger
