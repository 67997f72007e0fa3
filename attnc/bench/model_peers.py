"""Who takes part in `attnc bench --models`: attnc by its public functions, PyTorch, and libraries that are
installed. Each makes a launch for a cell, or says why it cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnc
from attnc.bench.model_cells import ModelCell, ModelInputs
from attnc.bench.peers import Flash3, need_flash3, options_of_flash3, options_of_flash4
from attnc.bench.run import Candidate, Unavailable
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnc.runtime.timing import Launch

ModelPeer: TypeAlias = Candidate[ModelCell, ModelInputs]
Make: TypeAlias = Callable[[ModelCell, ModelInputs], Launch]

OURS, DETERMINISTIC = "attnc", "attnc, the same bits"
#: attnc where K and V of a cell in pages lie in one tensor, as they do for PyTorch and cuDNN.
ONE_TENSOR = "attnc, one tensor"
READERS_OF_PAGES, READERS_OF_TENSORS = ("fa3", "fa3_vllm", "flashmla"), ("cudnn", "sdpa", "flex")


def _make_launch(cell: ModelCell, x: ModelInputs, forward: Launch) -> Launch:
    if cell.job != "training":
        return forward
    for leaf in x.leaves:
        leaf.requires_grad_()
    found: Any = forward()
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    do = torch.randn(o.shape, dtype=torch.float32, device=o.device).to(o.dtype)
    return lambda: torch.autograd.grad(o, x.leaves, do, retain_graph=True)


# --- attnc --------------------------------------------------------------------------------------------------


def ours(*, deterministic: bool) -> ModelPeer:
    """Returns attnc with gradients that are the same bits in every run, or with the fastest."""
    name = DETERMINISTIC if deterministic else OURS
    return Candidate(
        name=name, title=name, make=partial(_call_attnc, deterministic), compiles=True, ours=True
    )


def ours_of_one_tensor() -> ModelPeer:
    """Returns attnc reading one tensor where the cell has pages. Raises Unavailable for latents."""
    return Candidate(name=ONE_TENSOR, title=ONE_TENSOR, make=_call_attnc_of_tensor, compiles=True, ours=True)


def _call_attnc_of_tensor(cell: ModelCell, x: ModelInputs) -> Launch:
    if cell.latent:
        raise Unavailable("latents are read from pages")
    return _call_attnc(False, replace(cell, page=0), replace(x, pages=None, table=None))


def _call_attnc(deterministic: bool, cell: ModelCell, x: ModelInputs) -> Launch:
    if cell.latent:
        assert x.pages is not None
        return partial(_latent(cell.width, cell.value_width, cell.page), x.q, x.pages[0], x.table, x.lengths)
    options: dict[str, Any] = {"causal": cell.causal, "softcap": cell.softcap, "s_aux": x.sink}
    options["window_size"] = (-1 if cell.window is None else cell.window, -1)
    if x.pages is not None:
        paged = partial(flash_attn_with_kvcache, x.q, *x.pages, block_table=x.table)
        return partial(paged, cache_seqlens=x.lengths, **options)
    if cell.job in ("drafts", "decoding"):
        return partial(flash_attn_with_kvcache, x.q, x.k, x.v, **options)
    options["deterministic"] = deterministic
    if x.ends is not None:
        longest = max(cell.lengths)
        forward = partial(flash_attn_varlen_func, x.q, x.k, x.v, x.ends, x.ends, longest, longest, **options)
    else:
        forward = partial(flash_attn_func, x.q, x.k, x.v, **options)
    return _make_launch(cell, x, forward)


@cache
def _latent(width: int, value: int, page: int) -> Callable[..., Any]:
    return attnc.compile(f"""
attention latent {{
  input q: bf16[B, M, G, {width}]
  input k: bf16[B, N, 1, {width}] via paged(block_table, page = {page})
  input v: bf16[B, N, 1, {value}] via prefix(k)
  input block_table: i32[B, P]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = dot(q, k) / sqrt({width})
  mask = causal
  normalize = softmax
  output o: bf16[B, M, G, {value}]
}}
""")


# --- PyTorch ------------------------------------------------------------------------------------------------


def _sdpa(backend: SDPBackend | None) -> Make:
    def make(cell: ModelCell, x: ModelInputs) -> Launch:
        _need_plain(cell)
        if x.ends is not None:
            if backend is not None:
                raise Unavailable("takes no packed sequences")
            return _make_launch(cell, x, _varlen(cell, x))
        options: dict[str, Any] = {"enable_gqa": cell.heads != cell.kv_heads}
        if cell.causal and cell.queries == cell.keys:
            options["is_causal"] = True
        elif cell.causal and cell.queries > 1:
            if backend is not None:
                raise Unavailable("its causal masks begin at the first key")
            from torch.nn.attention.bias import causal_lower_right

            options["attn_mask"] = causal_lower_right(cell.queries, cell.keys)

        def launch() -> torch.Tensor:
            q, k, v = (y.transpose(1, 2) for y in x.leaves)
            return F.scaled_dot_product_attention(q, k, v, **options)

        if backend is None:
            return _make_launch(cell, x, launch)

        def launch_backend() -> torch.Tensor:
            with sdpa_kernel(backend):
                return launch()

        return _make_launch(cell, x, launch_backend)

    return make


def _varlen(cell: ModelCell, x: ModelInputs) -> Launch:
    from torch.nn.attention.varlen import varlen_attn

    assert x.ends is not None
    longest = max(cell.lengths)
    known = inspect.signature(varlen_attn).parameters
    mask: dict[str, Any] = {"is_causal": cell.causal}
    if "is_causal" not in known:
        mask = {"window_size": (-1, 0 if cell.causal else -1)}
    if "enable_gqa" in known:
        mask["enable_gqa"] = cell.heads != cell.kv_heads
    return partial(varlen_attn, x.q, x.k, x.v, x.ends, x.ends, longest, longest, **mask)


def _need_plain(cell: ModelCell) -> None:
    for asked, what in (
        (cell.window is not None, "windows"), (cell.softcap, "softcap"), (cell.sink, "sinks"),
        (cell.latent, "latent attention"),
    ):  # fmt: skip
        if asked:
            raise Unavailable(f"takes no {what}")


def _flex(cell: ModelCell, x: ModelInputs) -> Launch:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.sink or cell.latent or cell.lengths:
        raise Unavailable("needs a program of its own for sinks, latents and packed sequences")
    shift, window, cap = cell.keys - cell.queries, cell.window, cell.softcap

    def keep(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = kv_idx <= q_idx + shift
        return inside if window is None else inside & (q_idx + shift - kv_idx <= window)

    def cap_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    options: dict[str, Any] = {"enable_gqa": cell.heads != cell.kv_heads}
    if cell.causal and cell.queries > 1:
        options["block_mask"] = create_block_mask(keep, None, None, cell.queries, cell.keys, device="cuda")
    if cap:
        options["score_mod"] = cap_score
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def launch() -> Any:
        q, k, v = (y.transpose(1, 2) for y in x.leaves)
        return compiled(q, k, v, **options)

    return _make_launch(cell, x, launch)


# --- libraries ----------------------------------------------------------------------------------------------


def _flash3(cell: ModelCell, x: ModelInputs) -> Launch:
    if cell.sink:
        raise Unavailable("takes no sinks; fa3_vllm does")
    need_flash3()
    options = options_of_flash3(cell.width, causal=cell.causal, window=cell.window, softcap=cell.softcap)
    if cell.latent:
        return _flash3_of_latents(cell, x, options)
    if x.ends is not None:
        longest = max(cell.lengths)
        options |= {"cu_seqlens_q": x.ends, "cu_seqlens_k": x.ends}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if x.pages is not None:
        paged = {"page_table": x.table, "seqused_k": x.lengths, "max_seqlen_k": cell.keys}
        return partial(torch.ops.flash_attn_3.fwd, x.q, *x.pages, **options, **paged)
    return _make_launch(
        cell,
        x,
        lambda: Flash3.apply(x.q, x.k, x.v, options),  # type: ignore[no-untyped-call]  # torch's
    )


def _flash3_of_latents(cell: ModelCell, x: ModelInputs, options: Mapping[str, Any]) -> Launch:
    assert x.pages is not None
    at, pages = cell.value_width, x.pages[0]
    paged = {"page_table": x.table, "seqused_k": x.lengths, "max_seqlen_k": cell.keys}
    given = (x.q[..., at:], pages[..., at:], pages[..., :at])
    return partial(torch.ops.flash_attn_3.fwd, *given, q_v=x.q[..., :at], **options, **paged)


def _flash3_of_vllm(cell: ModelCell, x: ModelInputs) -> Launch:
    if cell.job == "training" or cell.latent:
        raise Unavailable("vLLM's build has forwards alone, and is not called for latents here")
    run, packed = flash3_of_vllm(), x.ends is not None
    q, k, v = (y if packed else y.flatten(0, 1) for y in x.leaves)
    of_q, of_k = (x.ends if packed else _ends(cell.batch, each) for each in (cell.queries, cell.keys))
    longest = max(cell.lengths, default=0)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "s_aux": x.sink}
    given |= options_of_flash3(cell.width, causal=cell.causal, window=cell.window, softcap=cell.softcap)
    given |= {"cu_seqlens_q": of_q, "max_seqlen_q": longest or cell.queries}
    given |= {"max_seqlen_k": longest or cell.keys}
    if x.pages is not None:
        given |= {"k": x.pages[0], "v": x.pages[1], "page_table": x.table, "seqused_k": x.lengths}
    else:
        given["cu_seqlens_k"] = of_k
    return partial(run, **given)


def flash3_of_vllm() -> Callable[..., Any]:
    """Returns vLLM's operator, of whose arguments nothing is asked that a call does not name."""
    try:
        import vllm.vllm_flash_attn._vllm_fa3_C  # noqa: F401 - it registers the operator
    except ImportError as error:
        raise Unavailable("vLLM's FlashAttention-3 is not installed") from error
    run = torch.ops._vllm_fa3_C.fwd.default
    nothing = dict.fromkeys(argument.name for argument in run._schema.arguments)
    return partial(run, **{**nothing, **_FLASH3_OF_VLLM})


#: Options of vLLM's operator, which has no defaults of its own.
_FLASH3_OF_VLLM: Mapping[str, Any] = {
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": False,
    "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


def _ends(count: int, length: int) -> torch.Tensor:
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device="cuda")


def _flash4(cell: ModelCell, x: ModelInputs) -> Launch:
    if cell.latent or cell.page:
        raise Unavailable("not called for pages here")
    try:
        from flash_attn.cute import flash_attn_func as dense
        from flash_attn.cute import flash_attn_varlen_func as packed
    except ImportError as error:
        raise Unavailable("flash-attn-4 is not installed") from error
    options = options_of_flash4(causal=cell.causal, window=cell.window, softcap=cell.softcap)
    if x.sink is not None:
        options["learnable_sink"] = x.sink
    if x.ends is not None:
        options |= {"cu_seqlens_q": x.ends, "cu_seqlens_k": x.ends}
        return _make_launch(cell, x, partial(packed, *x.leaves, **options))
    return _make_launch(cell, x, partial(dense, *x.leaves, **options))


def _flash_mla(cell: ModelCell, x: ModelInputs) -> Launch:
    if not cell.latent or x.pages is None:
        raise Unavailable("is for latent attention")
    try:
        import vllm._flashmla_C  # noqa: F401 - it registers the operator
    except ImportError as error:
        raise Unavailable("vLLM's FlashMLA is not installed") from error
    run = torch.ops._flashmla_C.dense_decode_fwd
    given = (x.q, x.pages[0], cell.value_width, x.lengths, x.table, cell.width**-0.5, True)
    _, _, plan, splits = run(*given, None, None, None)
    return lambda: run(*given, plan, splits, None)


def _with_same_bits(make: Make) -> Make:
    """Returns a peer's gradients that are the same bits in every run, as torch is asked for them."""

    def deterministic(cell: ModelCell, x: ModelInputs) -> Launch:
        if cell.job != "training":
            raise Unavailable("is about gradients")
        with _deterministic_algorithms():
            launch = make(cell, x)

        def again() -> object:
            with _deterministic_algorithms():
                return launch()

        return again

    return deterministic


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


#: Peers whose gradients are the same bits in every run.
SAME_BITS = ("sdpa_deterministic", "fa3_deterministic")
PEERS: Mapping[str, ModelPeer] = {
    peer.name: peer
    for peer in (
        ModelPeer(name="cudnn", title="cuDNN", make=_sdpa(SDPBackend.CUDNN_ATTENTION)),
        ModelPeer(name="sdpa", title="PyTorch's choice", make=_sdpa(None)),
        ModelPeer(name="fa3", title="FlashAttention-3", make=_flash3),
        ModelPeer(name="fa3_vllm", title="vLLM's FlashAttention-3", make=_flash3_of_vllm),
        ModelPeer(name="fa4", title="FlashAttention-4", make=_flash4, compiles=True),
        ModelPeer(name="flex", title="FlexAttention", make=_flex, compiles=True),
        ModelPeer(name="flashmla", title="FlashMLA", make=_flash_mla),
        ModelPeer(
            name="sdpa_deterministic",
            title="PyTorch's choice, the same bits",
            make=_with_same_bits(_sdpa(None)),
        ),
        ModelPeer(
            name="fa3_deterministic", title="FlashAttention-3, the same bits", make=_with_same_bits(_flash3)
        ),
    )
}
