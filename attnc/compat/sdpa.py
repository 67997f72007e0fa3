"""PyTorch's own attention on attnc's kernels, when a program asks for it:

    from attnc.compat import sdpa
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("attnc")

From then on `scaled_dot_product_attention` (where it takes its flash backend) and `varlen_attn` run on
attnc, until `torch.nn.attention.restore_flash_attention_impl()`. Needs PyTorch 2.11, which has that registry.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from attnc.api.repeats import Plan, keep, repeat, without_gradients
from attnc.compat.call import DENSE, FUNCTIONS, PACKED, PAGED, Call, arranged, check, refuse, rows
from attnc.support.memory import allocate, memory_of, plain

#: output, logsumexp, state of the dropout, two that nobody reads
_Forward: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NAME = "attnc for PyTorch"
_Library: Any = torch.library.Library  # has no types


class Handle:
    """What is in force; `remove` restores what was there before."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def register(name: str = "attnc") -> None:
    """Makes an implementation of this name known to `torch.nn.attention.activate_flash_attention_impl`.
    Raises ImportError before PyTorch 2.11.
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(name, register_fn=partial(activate, "CUDA"))


def activate(key: str) -> Handle:
    """Puts the functions of this module in place of PyTorch's, for a dispatch key."""
    library: Any = _Library("aten", "IMPL", key)
    with warnings.catch_warnings():  # that a kernel is overridden is what the caller asks for
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, function in _FUNCTIONS.items():
            if _is_there(name):
                library.impl(name, function, key)
    return Handle(library)


def _is_there(name: str) -> bool:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return found is not None and (overload or "default") in found.overloads()


@without_gradients
def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> _Forward:
    """Computes aten::_flash_attention_forward: dense [B, M, H, D], or packed [T, H, D] with cum_seq_q.

    num_splits: results do not depend on it. The mask of dropout follows from a seed that PyTorch's generator
    draws, and that the third result keeps.
    """
    refuse(_NAME, return_debug_mask=return_debug_mask)
    refuse(_NAME, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if cum_seq_q is None:
        refuse(f"{_NAME} without cum_seq_q", cum_seq_k=cum_seq_k, block_table=block_table)
    given = (query, key, value, cum_seq_q, cum_seq_k, seqused_k, alibi_slopes, block_table)
    known = None
    if not dropout_p and out is None:
        facts = ("flash_attention_forward", is_causal, scale, window_size_left, window_size_right)
        known, found = repeat(facts, given)
        if found is not None:
            o, lse = found[0]
            return _with_state(o, lse, query)
    axes = DENSE if cum_seq_q is None else PACKED if block_table is None else PAGED
    checked = check(_NAME, axes, query=query, key=key, value=value)
    if block_table is not None:
        checked.check("block_table", block_table, "B _", (torch.int32,))
    call = Call(_NAME, query, key, value, checked)
    _laid_out(call, cum_seq_q, cum_seq_k, seqused_k, block_table)
    call.score(scale, None, alibi_slopes, None)
    call.mask(is_causal, (window_size_left, window_size_right))
    call.drop(dropout_p)
    o, lse = call.run(out=out, key=known, given=dict(zip(_PACKED, given, strict=True)))
    results = _with_state(o, lse, query)
    if call.seed is not None:
        results[2].view(torch.int64)[0] = call.seed
    return results


#: Tensors of a call that its kernel may take, by its names for them.
_PACKED = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "block_table",
)  # fmt: skip


#: Layouts of the state of dropout, and of a number that nobody reads.
_STATE = ((2,), (1,), torch.uint64), ((), (), torch.uint64)


def _with_state(o: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> _Forward:
    """Returns results with what the backward of dropout reads, and what nobody reads."""
    state, unused, mask = allocate((*_STATE, ((0,), (1,), query.dtype)), query)
    return o, lse, state, unused, mask


def flash_attention_forward_inplace(out: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Computes aten::_flash_attention_forward_no_dropout_inplace: lse, with the result in `out`."""
    return flash_attention_forward(*arguments, out=out, **options)[1]


@without_gradients
def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> _Gradients:
    """Computes aten::_flash_attention_backward: the gradients of query, key and value."""
    given = (query, key, value, cum_seq_q, cum_seq_k)
    known = None
    if not dropout_p:
        facts = ("flash_attention_backward", is_causal, scale, window_size_left, window_size_right)
        known, found = repeat(facts, (grad_out, out, logsumexp, *given))
        if found is not None:
            gradients: _Gradients = found[0]
            return gradients
    axes = DENSE if cum_seq_q is None else PACKED
    call = Call(_NAME, query, key, value, check(_NAME, axes, query=query, key=key, value=value))
    call.score(scale, None, None, None)
    call.mask(is_causal, (window_size_left, window_size_right))
    call.drop(dropout_p, rng_state.view(torch.int64)[0] if dropout_p else None)
    _laid_out(call, cum_seq_q, cum_seq_k, None, None)
    gradients = call.gradients(grad_out, out, logsumexp)
    named = {name: x for name, x in zip(_PACKED, given, strict=False) if x is not None}
    order = call.order([*named], named)
    if order is not None:
        keep(known, _plan_backward(call.function, order))
    return gradients


def _plan_backward(function: str, order: tuple[int | torch.Tensor, ...]) -> Plan:
    """Returns the plan of calls of flash_attention_backward like one, of a kernel of this name."""
    inputs_of = arranged(order)

    def arrange(given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Any]:
        do, o, lse, *tensors = given
        inputs, _ = inputs_of(tensors)
        return (do, None, *inputs, rows(o), lse.contiguous(), None), None

    return Plan(getattr(FUNCTIONS, f"{function}_gradients"), None, arrange)


@without_gradients
def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Computes aten::_scaled_dot_product_flash_attention of [B, H, M, D]; the result lies as query does."""
    known = None
    if not (dropout_p or return_debug_mask):
        known, found = repeat(("sdpa_forward", is_causal, scale), (query, key, value))
        if found is not None:
            return _as_sdpa(found[0], query, key)
    refuse(_NAME, return_debug_mask=return_debug_mask)
    checked = check(_NAME, ("B H M D", "B Hkv N D", "B Hkv N Dv"), query=query, key=key, value=value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call = Call(_NAME, q, k, v, checked)
    call.score(scale, None, None, None)
    call.mask(is_causal, (None, None))
    call.drop(dropout_p)
    o, lse = call.run(out=_like(query, value).transpose(1, 2))
    results = _with_state(o, lse, query)
    if call.seed is not None:
        results[2].view(torch.int64)[0] = call.seed
    order = call.order("qkv", {"q": q, "k": k, "v": v})
    if order is not None:
        keep(known, _plan_sdpa(call.function, order, o, lse))
    return _as_sdpa(results, query, key)


def _like(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if query.shape[-1] == value.shape[-1] and query.stride(-1) == 1:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _as_sdpa(found: _Forward, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    o, lse, state, unused, mask = found
    return o.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], state, unused, mask


def _plan_sdpa(
    function: str, order: tuple[int | torch.Tensor, ...], o: torch.Tensor, lse: torch.Tensor
) -> Plan:
    """Returns the plan of calls of sdpa_forward like one whose kernel has this name, and which gave o and
    lse.
    """
    inputs_of, layouts = arranged(order), plain(map(memory_of, (o, lse)))

    def arrange(given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Any]:
        inputs, _ = inputs_of([x.transpose(1, 2) for x in given])
        return inputs, tuple(allocate(layouts, given[0]))

    def finish(found: Any, given: Sequence[torch.Tensor]) -> _Forward:
        o, lse = found
        return _with_state(o, lse, given[0])

    return Plan(getattr(FUNCTIONS, function), getattr(FUNCTIONS, f"{function}_call"), arrange, finish)


def sdpa_forward_quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    *arguments: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Runs `sdpa_forward`; scales of quantised tensors are refused."""
    refuse(_NAME, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return sdpa_forward(query, key, value, *arguments, **options)


@without_gradients
def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Computes aten::_scaled_dot_product_flash_attention_backward."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = flash_attention_backward(do, q, k, v, o, logsumexp, *arguments, **options)
    return tuple(x.transpose(1, 2) for x in gradients)


def _laid_out(
    call: Call,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    if cum_seq_q is None:
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)
        return
    call.set_ragged(cum_seq_q, None, name="cum_seq_q")
    lengths = cum_seq_k if seqused_k is None else seqused_k
    if lengths is None:
        raise ValueError(f"{_NAME}: cum_seq_k: expected a tensor, or seqused_k with block_table, got None")
    if block_table is not None:
        call.set_paged(block_table)
        name, called = ("cu_seqlens_k", "cum_seq_k") if seqused_k is None else ("seqused_k", "seqused_k")
        call.length(name, lengths, called=called)
    else:
        call.set_packed(cum_seq_k, name="cum_seq_k")
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)


_FUNCTIONS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward.quantized": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention.quantized": sdpa_forward_quantized,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
