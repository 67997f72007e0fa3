"""PyTorch's own attention on attnc's kernels, when a program asks for it:

    from attnc.compat import sdpa
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("attnc")

From then on `scaled_dot_product_attention` (where it takes its flash backend) and `varlen_attn` run on
attnc, until `torch.nn.attention.restore_flash_attention_impl()`. Needs PyTorch 2.11, which has that registry.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, TypeAlias

import torch

from attnc.compat.call import Call, refuse

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
    with torch.no_grad():
        call = Call(_NAME, query, key, value)
        call.score(scale, None, alibi_slopes, None)
        call.mask(is_causal, (window_size_left, window_size_right))
        call.drop(dropout_p)
        _laid_out(call, cum_seq_q, cum_seq_k, seqused_k, block_table)
        o, lse = call.run(out=out)
        state = torch.empty(2, dtype=torch.int64, device=query.device)  # which the backward of dropout reads
        if call.seed is not None:
            state[0] = call.seed
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return o, lse, state.view(torch.uint64), unused, query.new_empty(0)


def flash_attention_forward_inplace(out: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Computes aten::_flash_attention_forward_no_dropout_inplace: lse, with the result in `out`."""
    return flash_attention_forward(*arguments, out=out, **options)[1]


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
    with torch.no_grad():
        call = Call(_NAME, query, key, value)
        call.score(scale, None, None, None)
        call.mask(is_causal, (window_size_left, window_size_right))
        call.drop(dropout_p, rng_state.view(torch.int64)[0] if dropout_p else None)
        _laid_out(call, cum_seq_q, cum_seq_k, None, None)
        return call.gradients(grad_out, out, logsumexp)


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
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    if out.shape == query.shape and query.stride(-1) == 1:
        out = torch.empty_like(query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = q.shape[1], k.shape[1]
    _, lse, *rest = flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        out=out.transpose(1, 2),
    )
    return out, lse, None, None, max_q, max_k, *rest


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
    """Tells a call where the rows of its tensors are."""
    if cum_seq_q is None:
        refuse(f"{_NAME} without cum_seq_q", cum_seq_k=cum_seq_k, block_table=block_table)
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)
        return
    call.set_ragged(cum_seq_q, None)
    lengths = cum_seq_k if seqused_k is None else seqused_k
    if lengths is None:
        raise ValueError(f"{_NAME}: cum_seq_k: expected a tensor, or seqused_k with block_table, got None")
    if block_table is not None:
        call.set_paged(block_table)
        call.length("cu_seqlens_k" if seqused_k is None else "seqused_k", lengths)
    else:
        call.set_packed(cum_seq_k)
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
