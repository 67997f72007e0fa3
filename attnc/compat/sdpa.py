"""PyTorch's own attention on attnc's kernels, when a program asks for it:

    from attnc.compat import sdpa
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("attnc")

From then on `scaled_dot_product_attention` (where it takes its flash backend) and `varlen_attn` run on
attnc, until `torch.nn.attention.restore_flash_attention_impl()`. Needs PyTorch 2.11, which has that registry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import is_
from typing import Any, TypeAlias

import torch

from attnc.api.fastest import class_of_length
from attnc.api.repeats import Plan, keep, repeat, without_gradients
from attnc.api.tensors import refuse_gradients
from attnc.compat.call import DENSE, FUNCTIONS, PACKED, PAGED, Call, arrange_by, check, refuse, rows
from attnc.support.memory import Layout, allocate, lay_like, memory_of, plain, turned
from attnc.support.repeat import Again

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


def _refuse_gradients_beside(*names: str) -> Callable[[_Forwarding], _Forwarding]:
    """Refuses calls with gradients where one of these arguments is given: PyTorch's operator of a backward
    does not take it, and would give gradients of another call.
    """

    def decorate(function: _Forwarding) -> _Forwarding:
        @wraps(function)
        def call(*given: Any, **named: Any) -> _Forward:
            for name in names:
                if named.get(name) is not None:
                    tensors = dict(zip(("query", "key", "value"), given, strict=False))
                    refuse_gradients(f"{_NAME} with {name}", **tensors)
            return function(*given, **named)

        return call

    return decorate


_Forwarding: TypeAlias = Callable[..., _Forward]


@_refuse_gradients_beside("alibi_slopes", "seqused_k", "block_table")
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
        window = window_size_left, window_size_right
        facts = ("flash_attention_forward", is_causal, scale, *window, class_of_length(max_q))
        known, found = repeat(facts, given)
        if found is not None:
            o, lse = found[0]
            return _with_state(o, lse, query)
    axes = DENSE if cum_seq_q is None else PACKED if block_table is None else PAGED
    checked = check(_NAME, axes, query=query, key=key, value=value)
    if block_table is not None:
        checked.check("block_table", block_table, "B _", (torch.int32,))
    call = Call(_NAME, query, key, value, checked)
    _laid_out(call, cum_seq_q, cum_seq_k, seqused_k, block_table, max_q)
    call.score(scale, None, alibi_slopes, None)
    call.mask(is_causal, (window_size_left, window_size_right))
    call.drop(dropout_p)
    o, lse = call.run(out=out, key=known, given=dict(zip(_PACKED, given, strict=True)))
    return _with_state(o, lse, query, call.seed)


#: Tensors of a call that its kernel may take, by its names for them.
_PACKED = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "block_table",
)  # fmt: skip


#: Layouts of the state of dropout, and of a number that nobody reads.
_STATE = ((2,), (1,), torch.uint64), ((), (), torch.uint64)
#: Results without dropout that nobody reads or writes, by device and element type: allocating them would take
#: as long as all else on the host.
_UNREAD: dict[tuple[torch.device, torch.dtype], Sequence[torch.Tensor]] = {}


def _with_state(
    o: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, seed: torch.Tensor | None = None
) -> _Forward:
    if seed is None:
        state, unused, mask = _unread(query)
        return o, lse, state, unused, mask
    state, unused, mask = _allocate_state(query)
    state.view(torch.int64)[0] = seed
    return o, lse, state, unused, mask


def _unread(query: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns them, kept from an earlier call. What leaves a graph has to be in the graph's own memory:
    beside the default stream, where no graph is recorded, they are allocated anew.
    """
    if query.is_cuda and torch._C._cuda_getCurrentRawStream(query.get_device()):
        return _allocate_state(query)
    found = _UNREAD.get((query.device, query.dtype))
    if found is None:
        with torch.inference_mode(False):  # a gradient may be computed with them later
            found = _allocate_state(query)
        if type(found[0]) is torch.Tensor:
            _UNREAD[query.device, query.dtype] = found
    return found


def _allocate_state(query: torch.Tensor) -> Sequence[torch.Tensor]:
    return allocate((*_STATE, ((0,), (1,), query.dtype)), query)


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
    gradients, function, order = _differentiate(
        (grad_out, out, logsumexp), given, (is_causal, window_size_left, window_size_right), scale,
        dropout_p, rng_state,
    )  # fmt: skip
    return _lay(gradients, given, known, None if order is None else _BackwardPlan(function, order))


def _differentiate(
    results: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor | None],
    mask: tuple[bool, int | None, int | None],
    scale: float | None,
    dropout_p: float,
    rng_state: torch.Tensor,
) -> tuple[_Gradients, str, Sequence[int | torch.Tensor] | None]:
    """Returns gradients, the name of the kernel's function and its inputs (`Call.order`).

    results: gradient of the output, output, lse; given: query, key, value, cum_seq_q, cum_seq_k; mask:
    causal, left, right.
    """
    query, key, value, cum_seq_q, cum_seq_k = given
    assert query is not None
    assert key is not None
    assert value is not None
    axes = DENSE if cum_seq_q is None else PACKED
    call = Call(_NAME, query, key, value, check(_NAME, axes, query=query, key=key, value=value))
    call.score(scale, None, None, None)
    call.mask(mask[0], mask[1:])
    call.drop(dropout_p, rng_state.view(torch.int64)[0] if dropout_p else None)
    _laid_out(call, cum_seq_q, cum_seq_k, None, None)
    do, o, lse = results
    gradients = call.gradients(do, o, lse)
    named = {name: x for name, x in zip(_PACKED, given, strict=False) if x is not None}
    return gradients, call.function, call.order([*named], named)


def _turn(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def _turn_layout(layout: Layout) -> Layout:
    return turned(layout, (0, 2, 1, 3)) if len(layout[0]) == 4 else layout


def _lay(gradients: _Gradients, inputs: Sequence[Any], known: Any, plan: Plan | None) -> _Gradients:
    """Returns gradients with the strides that PyTorch's operators of a backward promise, which compiled code
    relies on: those of torch.empty_like. Keeps a plan for such calls where they have them, as they do but for
    inputs whose rows are copied or whose axes are expanded.
    """
    dq, dk, dv = (lay_like(dx, x) for dx, x in zip(gradients, inputs, strict=False))
    if plan is not None and all(map(is_, (dq, dk, dv), gradients)):
        keep(known, plan)
    return dq, dk, dv


class _BackwardPlan(Plan):
    """Calls of a backward like one, of the gradient of the output, output, lse, query, key, value, and what
    else there is.

    turned: all but lse are [B, H, M, D]. A kernel reads addresses, so that what looks like tensors of the
    call before is launched as it is given.
    """

    __slots__ = ("inputs_of", "resume", "turned")

    def __init__(self, function: str, order: Sequence[int | torch.Tensor], *, turned: bool = False) -> None:
        self.inputs_of, self.turned = arrange_by(order), turned
        self.resume = getattr(FUNCTIONS, f"{function}_call").resume_gradients
        super().__init__(getattr(FUNCTIONS, f"{function}_gradients"), None, self._arrange, self._finish)

    def _arrange(self, given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Any]:
        do, o, lse, *tensors = given
        if self.turned:
            do, o, *tensors = map(_turn, (do, o, *tensors))
        return (do, None, *self.inputs_of(tensors)[0], rows(o), lse.contiguous(), None), None

    def _finish(self, found: _Gradients, given: Sequence[torch.Tensor]) -> _Gradients:
        dq, dk, dv = map(_turn, found) if self.turned else found
        return dq, dk, dv

    def settle(self, tensors: Sequence[Any]) -> Again:
        _, o, lse, *_ = tensors
        if o.stride(-1) != 1 or not lse.is_contiguous():  # copies are taken
            return self.run
        again = self.resume(self._arrange(tensors)[0][:-1], _turn_layout if self.turned else lambda x: x)
        if again is None:
            return self.run
        inputs_of = self.inputs_of

        def run(given: Sequence[Any]) -> Any:
            do, o, lse, *tensors = given
            return again((do, None, *inputs_of(tensors)[0], o, lse))

        return run


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
            results: tuple[Any, ...] = found[0]
            return results
    refuse(_NAME, return_debug_mask=return_debug_mask)
    checked = check(_NAME, ("B H M D", "B Hkv N D", "B Hkv N Dv"), query=query, key=key, value=value)
    q, k, v = map(_turn, (query, key, value))
    call = Call(_NAME, q, k, v, checked)
    call.score(scale, None, None, None)
    call.mask(is_causal, (None, None))
    call.drop(dropout_p)
    o, lse = call.run(out=_turn(_like(query, value)))
    found = _with_state(o, lse, query, call.seed)
    order = call.order("qkv", {"q": q, "k": k, "v": v})
    if order is not None:
        keep(known, _ForwardPlan(call.function, order, found))
    return _as_sdpa(found, query, key)


def _like(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if query.shape[-1] == value.shape[-1] and query.stride(-1) == 1:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _as_sdpa(found: _Forward, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    o, lse, state, unused, mask = found
    return _turn(o), lse, None, None, query.shape[2], key.shape[2], state, unused, mask


class _ForwardPlan(Plan):
    """Calls of sdpa_forward like one, which gave these results of [B, M, H, D]. Kernels read addresses, so
    that what looks like tensors of the call before is launched as it is given.
    """

    __slots__ = ("inputs_of", "layouts")

    def __init__(self, function: str, order: Sequence[int | torch.Tensor], found: _Forward) -> None:
        self.inputs_of, self.layouts = arrange_by(order), plain(map(memory_of, found[:2]))
        functions = getattr(FUNCTIONS, function), getattr(FUNCTIONS, f"{function}_call")
        super().__init__(*functions, self._arrange, self._finish)

    def _arrange(self, given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Any]:
        return self.inputs_of([*map(_turn, given)])[0], tuple(allocate(self.layouts, given[0]))

    def _finish(self, found: Any, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        query, key, _ = given
        o, lse = found
        return _as_sdpa(_with_state(o, lse, query), query, key)

    def settle(self, tensors: Sequence[Any]) -> Again:
        laid = _turn_layout(self.layouts[0]), self.layouts[1]
        again = self.call.resume(*self._arrange(tensors), laid=laid)
        if again is None:
            return self.run
        inputs_of = self.inputs_of
        rows, keys = tensors[0].shape[2], tensors[1].shape[2]

        def run(given: Sequence[Any]) -> tuple[Any, ...]:
            o, lse = again(inputs_of(given)[0])
            return o, lse, None, None, rows, keys, *_unread(given[0])

        return run


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
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> _Gradients:
    """Computes aten::_scaled_dot_product_flash_attention_backward."""
    given = (grad_out, out, logsumexp, query, key, value)
    known = None
    if not dropout_p:
        known, found = repeat(("sdpa_backward", is_causal, scale), given)
        if found is not None:
            again: _Gradients = found[0]
            return again
    do, o, q, k, v = map(_turn, (grad_out, out, query, key, value))
    mask = is_causal, None, None
    (dq, dk, dv), function, order = _differentiate(
        (do, o, logsumexp), (q, k, v, None, None), mask, scale, dropout_p, philox_seed
    )
    plan = None if order is None else _BackwardPlan(function, order, turned=True)
    return _lay((_turn(dq), _turn(dk), _turn(dv)), given[3:], known, plan)


def _laid_out(
    call: Call,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_q: int | None = None,
) -> None:
    if cum_seq_q is None:
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)
        return
    call.set_ragged(cum_seq_q, None, name="cum_seq_q", most=max_q)
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
