"""What serving engines call: new tokens against keys in pages (`attend`), and packed tokens against packed
keys (`attend_packed`), as prompts of latent attention have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnc.adapters.specs import (
    NARROW,
    Change,
    Changes,
    Kernel,
    Wanted,
    expand_scales,
    find_function,
    kernel,
    kernel_name,
    plan_of,
    suits_conversion,
    tile_rows,
)
from attnc.api.fastest import SHORT_KEYS, are_few, count_sharing
from attnc.api.repeats import keep, repeat, without_gradients
from attnc.api.tensors import FLOATS, INTEGERS, NUMBERS, GivenTensors
from attnc.paging.trees import WORDS
from attnc.support.devices import gpu_of


class _PageForm(NamedTuple):
    """What a kernel of pages depends on. latent: values are columns of the keys; tree: the type of what says
    which new tokens see which; biased_apart: new tokens of each sequence have a bias of their own; split: a
    number of tokens of every sequence is known; few: it is not, and small; rows: of a tile of queries where
    keys are split; is_long: tables have room for more than `SHORT_KEYS` keys; converts: the cache becomes 16
    bits before the kernel; order: keys of a segment, 0 for none; walks: a block has all
    segments of its rows.
    """

    dtype: torch.dtype
    cache: torch.dtype | None
    head_dim: int
    value_dim: int
    latent: bool
    page: int
    scale: float
    left: int
    softcap: float
    causal: bool
    inputs: frozenset[str]
    tree: torch.dtype | None
    biased_apart: bool
    split: bool
    few: bool
    rows: int
    is_long: bool
    converts: bool
    order: int
    walks: bool


@without_gradients
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    left: int,
    softcap: float,
    by_head: dict[str, torch.Tensor | None],
    tokens: int,
    few: bool = False,
    causal: bool = True,
    tree: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    order: int = 0,
) -> None:
    """Writes the attention of every token to `out`, a sequence's last token at its last key. Gradients do not
    flow through it, whatever mode the caller is in: engines compute q with weights that may require them.

    q: [T, Hq, D]; k: [pages, page, Hkv, D]; v: [pages, page, Hkv, Dv], both of any strides but a contiguous
        last axis, or None: the first Dv columns of k are the values, as in latent attention
    out: [T, Hq, Dv]
    cu_seqlens_q: i32[B + 1]; seqused_k: i32[B], keys with those of the new tokens; block_table: i32[B, P]
    left: keys before a query that it sees, -1 for all; softcap: 0 or less for none
    by_head: "alibi_slopes" and "sinks", f32[Hq] or None
    tokens: of every sequence, T = B * tokens: those of a sequence follow each other, and its keys are split
        among programs; cu_seqlens_q is not looked at. 0: cu_seqlens_q says how many each has
    few: whether there are few new tokens, so that keys are split for each by itself; beside an order, on
        Hopper alone
    causal: a token sees keys up to its own; else all keys of its sequence, of which `left` leaves some out
    tree: bool[B, tokens, tokens], new token i sees new token j, in place of all up to its own; wants
        `tokens`. Or words of uint8, int32 or int64, [B, tokens, ceil(tokens / bits)], the lowest bit first
    qq_bias: [X, X], or [B, X, X] of each sequence, added to the score of new token i and new token j, 0
        beyond X
    k_descale, v_descale: what k and v of 8 bits are multiplied by, f32 that expands to [B, Hkv], or a number,
        which a captured graph keeps; None for 1. Of other caches they are not looked at
    order: keys of a segment, in which sums are formed, so that a token has the same bits in every call; 0:
        sums come in any order

    scale, left and softcap are part of the kernel, so a new value of one compiles once. ValueError or
    TypeError names the argument, what was expected and what came. Never waits for the device.
    """
    scales = (k_descale, v_descale)
    numbers = [None if isinstance(x, torch.Tensor) else x for x in scales]
    given = {
        "q": q, "k": k, "v": v, "block_table": block_table, "seqused_k": seqused_k,
        "cu_seqlens_q": None if tokens else cu_seqlens_q, "tree": tree, "qq_bias": qq_bias,
        "k_descale": None if numbers[0] is not None else k_descale,
        "v_descale": None if numbers[1] is not None else v_descale,
        **by_head, "out": out,
    }  # fmt: skip
    facts = ("attend", scale, left, softcap, tokens, few, causal, order, *numbers, *by_head)
    key, found = repeat(facts, (*given.values(),))
    if found is not None:
        return
    dtype, cache = _check_tensors(given, tokens)
    sequences, heads = len(seqused_k), k.shape[2]
    changes: Changes = {name: torch.Tensor.float for name in (*by_head, "qq_bias") if given[name] is not None}
    if cache is not None:
        for name, x in zip(("k_descale", "v_descale"), scales, strict=True):
            if x is not None:
                changes[name] = _expand(name, x, (sequences, heads))
    name = _kernel_name(
        _PageForm(
            dtype=dtype,
            cache=cache,
            head_dim=q.shape[-1],
            value_dim=out.shape[-1],
            latent=v is None,
            page=k.shape[1],
            scale=float(scale),
            left=left,
            softcap=float(softcap),
            causal=causal,
            inputs=frozenset((*changes, *(["tree"] if tree is not None else []))),
            tree=None if tree is None else tree.dtype,
            biased_apart=qq_bias is not None and qq_bias.dim() > 2,
            split=tokens > 0,
            few=few and not tokens,
            rows=0 if order else tile_rows(count_sharing(tokens or 1, q.shape[1], heads)),
            is_long=tokens > 0 and block_table.shape[1] * k.shape[1] > SHORT_KEYS,
            converts=_converts(q, k, v, block_table)
            if cache is not None and not tokens and not few
            else False,
            order=order,
            walks=order > 0
            and (tokens > 0 or few)
            and _fill_device(q, sequences, tokens or len(q) // sequences),
        )
    )
    if tokens:
        for name_of, x in (("q", q), ("out", out)):
            changes[name_of] = _view((x.shape[0] // tokens, tokens, *x.shape[1:]))
    plan = plan_of(find_function(name, q, k, v), [n for n, x in given.items() if x is not None], changes)
    plan.run([x for x in given.values() if x is not None])
    keep(key, plan)


def _converts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, table: torch.Tensor) -> bool:
    if v is None:
        return False
    heads, columns = (q.shape[1], k.shape[2]), (q.shape[2], v.shape[3])
    return suits_conversion(q.shape[0], heads, len(table), table.numel() * k.shape[1], columns)


def _fill_device(q: torch.Tensor, sequences: int, tokens: int) -> bool:
    """Returns whether tiles of rows alone keep a GPU busy, so that no program needs to share their keys."""
    if not q.is_cuda:
        return False
    tiles = sequences * -(-tokens * q.shape[1] // _TILE_ROWS)
    return tiles >= _BUSY * gpu_of(q.get_device()).multiprocessors


def _expand(name: str, x: torch.Tensor | float, shape: tuple[int, int]) -> Change:
    """Returns the change that makes scales of each sequence and head out of a tensor, or out of q if x is a
    number.
    """
    if isinstance(x, torch.Tensor):
        return lambda x: expand_scales(name, x, shape, x.device)
    return lambda q: expand_scales(name, x, shape, q.device)


def _view(shape: tuple[int, ...]) -> Change:
    return lambda x: x.view(shape)


def uniform(tokens: int, most: int, sequences: int) -> int:
    """Returns how many new tokens each sequence has, for `attend`, where that follows from `tokens` in all
    and `most` of one, and is few enough to split the keys; else 0.
    """
    return most if most > 0 and are_few(most) and tokens == most * sequences else 0


#: Rows of a tile of Hopper's kernels, and tiles for each multiprocessor from which all segments of rows are
#: faster in one block than in a block each: what blocks hand on, and how they begin, costs a quarter.
_TILE_ROWS, _BUSY = 64, 0.75


def _check_tensors(given: Mapping[str, Any], tokens: int) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the element type of q, and that of the cache where it has 8 bits. TypeError and ValueError
    where arguments do not go together.
    """
    q, k, v, tree = (given[name] for name in ("q", "k", "v", "tree"))
    checked = GivenTensors()
    checked.check("q", q, "T H D", FLOATS)
    known = (q.dtype,) if q.dtype is torch.float32 else (q.dtype, *NARROW)
    if isinstance(k, torch.Tensor) and k.dtype is torch.uint8:
        hint = "bytes of fp8 are passed by k.view(torch.float8_e4m3fn)"
        raise TypeError(f"k: expected dtype {' or '.join(map(str, known))} beside q, got {k.dtype}: {hint}")
    checked.check("k", k, "P page Hkv D", known, "beside q")
    checked.check_pages("k", q)
    checked.check_groups("q", "k")
    if v is not None:
        checked.check("v", v, "P page Hkv Dv", (k.dtype,), "like k")
    checked.check("out", given["out"], "T H Dv", (q.dtype,), "like q")
    checked.check_columns(q="D", out="Dv")
    checked.check_rows(q=q, k=k, out=given["out"], **({} if v is None else {"v": v}))
    checked.check("seqused_k", given["seqused_k"], "B", (torch.int32,))
    checked.check("block_table", given["block_table"], "B _", (torch.int32,))
    if not tokens:
        checked.check("cu_seqlens_q", given["cu_seqlens_q"], "B+1", (torch.int32,))
    for name in ("alibi_slopes", "sinks"):
        if given.get(name) is not None:
            checked.check(name, given[name], "H", NUMBERS)
    bias = given["qq_bias"]
    if bias is not None:
        by_sequence = isinstance(bias, torch.Tensor) and bias.dim() > 2
        checked.check("qq_bias", bias, "B X X" if by_sequence else "X X", NUMBERS)
    if tree is not None:
        _check_tree(checked, tree, tokens)
    return q.dtype, None if k.dtype == q.dtype else k.dtype


@lru_cache(maxsize=256)
def _kernel_name(form: _PageForm) -> str:
    """Returns the name of the kernel of a form. Its inputs are named like the arguments: what a kernel
    refuses, the caller knows by that name.
    """
    tokens = "B, M" if form.split else "T"
    packed = "" if form.split else " via ragged(cu_seqlens_q)"
    paged = f"via paged(block_table, page = {form.page})"
    value, value_dim = "", 0
    if form.latent:
        value, value_dim = "[B, N, Hkv, Dv] via prefix(k)", form.value_dim
    elif form.value_dim != form.head_dim:
        value, value_dim = f"[B, N, Hkv, Dv] {paged}", form.value_dim
    return kernel_name(
        Wanted(
            name="latent_attention" if form.latent else "unified_attention",
            dtype=form.dtype,
            head_dim=form.head_dim,
            scale=form.scale,
            q=f"[{tokens}, Hkv * G, D]{packed}",
            kv=f"[B, N, Hkv, D] {paged}",
            value=value,
            value_dim=value_dim,
            o=f"[{tokens}, Hkv * G, {'Dv' if value else 'D'}]",
            inputs=(
                *(() if form.split else ("cu_seqlens_q: i32[B + 1]",)),
                "block_table: i32[B, P]",
                "seqused_k: i32[B]",
                *((f"tree: {_TREES[form.tree]}",) if form.tree is not None else ()),
                *((f"qq_bias: f32[{'B, ' * form.biased_apart}X, X]",) if "qq_bias" in form.inputs else ()),
            ),
            length="seqused_k",
            mask=_mask(form.left, form.causal, form.tree),
            terms=(f"qq_bias[{'b, ' * form.biased_apart}q_idx, kv_idx - (N - M)]",)
            if "qq_bias" in form.inputs
            else (),
            softcap=form.softcap,
            slopes="alibi_slopes" if "alibi_slopes" in form.inputs else "",
            sink="sinks" if "sinks" in form.inputs else "",
            decode=form.split or form.few,
            rows=form.rows,
            is_long=form.is_long,
            order=form.order,
            walks=form.walks,
            cache=form.cache,
            converts=form.converts,
            k_scale="k_descale" if "k_descale" in form.inputs else "",
            v_scale="v_descale" if "v_descale" in form.inputs else "",
        )
    )


#: Of what says which new tokens see which: how it is declared.
_TREES = {
    torch.bool: "bool[B, M, M]",
    torch.uint8: "u8[B, M, W]",
    torch.int32: "i32[B, M, W]",
    torch.int64: "i64[B, M, W]",
}


def _check_tree(checked: GivenTensors, tree: torch.Tensor, tokens: int) -> None:
    if not tokens:
        raise ValueError(f"tree: expected None where sequences have different tokens, got {list(tree.shape)}")
    words = -(-tokens // WORDS.get(getattr(tree, "dtype", torch.bool), 1))
    checked.check("tree", tree, f"B {tokens} {words}", (*_TREES,))


def _mask(left: int, causal: bool, tree: torch.dtype | None) -> str:
    if causal and tree is None:
        return "causal" if left < 0 else f"window({left}, 0)"
    seen = []
    if tree is torch.bool:
        seen = ["(kv_idx < N - M or tree[b, q_idx, kv_idx - (N - M)])"]
    elif tree is not None:
        seen = [f"draft_tree(tree, {WORDS[tree]})"]
    return " and ".join(([] if left < 0 else [f"q_pos - kv_idx <= {left}"]) + seen)


# --- packed tokens against packed keys ----------------------------------------------------------------------


@without_gradients
def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    lse: bool,
    out: torch.Tensor | None = None,
    order: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns o: [T, Hq, Dv], and with `lse` its logsumexp in base e, f32[Hq, T], of sequences end to end.

    q: [T, Hq, D]; k: [S, Hkv, D]; v: [S, Hkv, Dv], any strides but a contiguous last axis
    cu_seqlens_q, cu_seqlens_k: i32[B + 1], where sequences begin and end
    causal: the last query of a sequence at its last key; else all see all keys
    out: where o goes
    order: keys of a segment, in which sums are formed, so that a token has the same bits in every call; 0:
        sums come in any order

    A sequence without keys has o = 0 and lse = minus infinity. ValueError or TypeError names the argument.
    """
    checked = GivenTensors()
    checked.check("q", q, "T H D", FLOATS)
    checked.check("k", k, "S Hkv D", (q.dtype,), "like q")
    checked.check("v", v, "S Hkv Dv", (q.dtype,), "like q")
    checked.check_columns(q="D", v="Dv")
    checked.check_groups("q", "k")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checked.check(name, starts, "B+1", INTEGERS)
    form = (q.dtype, q.shape[-1], v.shape[-1], float(scale), causal, lse, order)
    into: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = out
    if lse and out is not None:
        into = out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    made = _packed_kernel(*form)(q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), out=into)
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = made
    return found


@lru_cache(maxsize=64)
def _packed_kernel(
    dtype: torch.dtype, head_dim: int, value_dim: int, scale: float, causal: bool, lse: bool, order: int
) -> Kernel:
    return kernel(
        Wanted(
            name="packed_attention",
            dtype=dtype,
            head_dim=head_dim,
            scale=scale,
            q="[T, Hkv * G, D] via ragged(cu_seqlens_q)",
            kv="[S, Hkv, D] via ragged(cu_seqlens_k)",
            value="[S, Hkv, Dv] via ragged(cu_seqlens_k)",
            value_dim=value_dim,
            o="[T, Hkv * G, Dv]",
            inputs=("cu_seqlens_q: i32[B + 1]", "cu_seqlens_k: i32[B + 1]"),
            length="",
            mask="causal" if causal else "",
            lse="[Hkv * G, T]" if lse else "",
            order=order,
        )
    )
