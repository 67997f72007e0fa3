"""Who takes part in `attnc bench --lists`: attnc, PyTorch's FlexAttention, and libraries that are installed.
Each makes a launch for a cell, or says why it cannot. What a peer's own format of lists takes is made before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

import attnc
from attnc.bench.list_cells import ListCell, ListInputs
from attnc.bench.run import Candidate, Unavailable
from attnc.runtime.timing import Launch

ListPeer: TypeAlias = Candidate[ListCell, ListInputs]
Make: TypeAlias = Callable[[ListCell, ListInputs], Launch]

OURS, ADDED, TRITON, DENSE = "attnc", "added", "triton", "dense"


def _make_launch(cell: ListCell, x: ListInputs, call: Callable[..., Any]) -> Launch:
    given = [getattr(x, name) for name in cell.differentiated]
    if cell.job == "forward":
        return partial(call, *given)
    leaves = [leaf.detach().requires_grad_() for leaf in given]
    found: Any = call(*leaves)
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    do = torch.randn(o.shape, dtype=torch.float32, device=o.device).to(o.dtype)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


# --- attnc --------------------------------------------------------------------------------------------------


def ours() -> tuple[ListPeer, ...]:
    """Returns attnc, with gradients that are added in any order, its kernels for Triton, and attnc over all
    keys.
    """
    made: Mapping[str, tuple[str, Make]] = {
        OURS: ("attnc", _call_attnc),
        ADDED: ("attnc, added in any order", _call_added),
        TRITON: ("attnc, Triton", partial(_call_attnc, target="triton")),
        DENSE: ("attnc over all keys", _call_dense),
    }
    return tuple(
        Candidate(name=name, title=title, make=make, compiles=True, ours=True)
        for name, (title, make) in made.items()
    )


def _call_attnc(cell: ListCell, x: ListInputs, target: str | None = None) -> Launch:
    compiled = attnc.compile(cell.spec(), target=target)
    return _make_launch(cell, x, lambda *given: compiled(*given, x.idx))


def _call_added(cell: ListCell, x: ListInputs) -> Launch:
    if cell.job == "forward":
        raise Unavailable("gradients are added in an order, nothing else")
    compiled = attnc.compile(cell.spec(), deterministic=False)
    return _make_launch(cell, x, lambda *given: compiled(*given, x.idx))


def _call_dense(cell: ListCell, x: ListInputs) -> Launch:
    compiled = attnc.compile(cell.spec(dense=True))
    if cell.latent:  # as many keys as a list names: what a list costs
        x = replace(x, k=x.k[:, : cell.entries * cell.block])
    return _make_launch(cell, x, compiled)


# --- peers --------------------------------------------------------------------------------------------------


def _flex(cell: ListCell, x: ListInputs) -> Launch:
    from torch.nn.attention.flex_attention import flex_attention

    if cell.rows < 16 or cell.block < 16:
        raise Unavailable("FlexAttention lists blocks for tiles of queries")
    options: Any = {}
    if cell.rows < 128:  # its own tiles are larger
        options = {"fwd_BLOCK_M": cell.rows, "fwd_BLOCK_N": cell.block}
        options |= {f"bwd_BLOCK_{name}": cell.rows // 2 for name in ("M1", "N2")}
        options |= {f"bwd_BLOCK_{name}": cell.rows for name in ("N1", "M2")}
    mask = _block_mask(cell, x.idx)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return compiled(
            q, k, v, block_mask=mask, kernel_options=options, enable_gqa=cell.heads != cell.kv_heads
        )

    return _make_launch(cell, x, call)


def _block_mask(cell: ListCell, idx: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    counts, full = _as_full_blocks(cell, idx)
    nothing = torch.zeros_like(counts), torch.zeros_like(full)
    size, lengths = (cell.rows, cell.block), (cell.queries, cell.keys)
    return BlockMask.from_kv_blocks(*nothing, counts, full, BLOCK_SIZE=size, seq_lengths=lengths)


def _as_full_blocks(cell: ListCell, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns lists as counts and rows with room for all blocks, for every head of q."""
    if cell.causal:
        raise Unavailable("full blocks alone are compared")
    idx = idx.repeat_interleave(cell.heads // cell.kv_heads, dim=1)
    full = torch.zeros(*idx.shape[:3], cell.blocks, dtype=torch.int32, device=idx.device)
    full[..., : idx.shape[-1]] = idx
    return (idx >= 0).sum(-1, dtype=torch.int32), full


def _flash4(cell: ListCell, x: ListInputs) -> Launch:
    if (cell.rows, cell.block) != (128, 128):
        raise Unavailable("flash-attn-4 lists blocks of 128 keys for 128 queries on Hopper")
    try:
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as error:
        raise Unavailable("flash-attn-4 is not installed") from error
    lists = {"block_sparse_tensors": _for_flash4(BlockSparseTensorsTorch, *_as_full_blocks(cell, x.idx))}
    if cell.job == "gradients":
        inverted = _for_flash4(BlockSparseTensorsTorch, *_invert(cell, x.idx))
        lists["block_sparse_tensors_bwd"] = inverted
    return _make_launch(cell, x, partial(flash_attn_func, **lists))


def _for_flash4(make: Any, counts: torch.Tensor, full: torch.Tensor) -> Any:
    return make(torch.zeros_like(counts), torch.zeros_like(full), counts, full, block_size=(128, 128))


def _invert(cell: ListCell, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    named = torch.zeros(*idx.shape[:3], cell.blocks + 1, dtype=torch.bool, device=idx.device)
    named.scatter_(-1, idx.long() % (cell.blocks + 1), value=True)
    by_key = named[..., : cell.blocks].transpose(2, 3)
    order = by_key.int().argsort(dim=-1, descending=True, stable=True)
    return by_key.sum(-1, dtype=torch.int32), order.int().contiguous()


def _nsa(cell: ListCell, x: ListInputs) -> Launch:
    group = cell.heads // cell.kv_heads
    if cell.rows != 1 or cell.block < 16 or group < 16 or cell.queries != cell.keys:
        raise Unavailable("parallel_nsa lists blocks for each query, of 16 heads or more, from the first on")
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        raise Unavailable("flash-linear-attention is not installed") from error
    named = x.idx.transpose(1, 2).long().contiguous()
    counts = (named >= 0).sum(-1)
    options = {"block_indices": named.clamp(min=0), "block_counts": counts, "block_size": cell.block}
    return _make_launch(cell, x, partial(parallel_nsa, **options))


def _flash_mla(cell: ListCell, x: ListInputs) -> Launch:
    if not cell.latent or cell.job != "forward":
        raise Unavailable("FlashMLA is for prompts and tokens of latent attention")
    run = _operators_of_flash_mla().sparse_prefill_fwd
    named = _name_rows(cell, x.idx).reshape(-1, 1, cell.entries)
    q, kv = x.q.flatten(0, 1), x.k.flatten(0, 1)
    return partial(run, q, kv, named, cell.width**-0.5, cell.value, None, None, None)


def _operators_of_flash_mla() -> Any:
    try:
        import vllm._flashmla_C  # noqa: F401 - it registers the operators
    except ImportError as error:
        raise Unavailable("vLLM's FlashMLA is not installed") from error
    return torch.ops._flashmla_C


def _name_rows(cell: ListCell, idx: torch.Tensor) -> torch.Tensor:
    first = (torch.arange(cell.batch, device=idx.device, dtype=torch.int32) * cell.keys).view(-1, 1, 1, 1)
    return torch.where(idx >= 0, idx + first, -1).transpose(1, 2).contiguous()


# --- rows of several types ----------------------------------------------------------------------------------


def _store_rows(cell: ListCell, x: ListInputs) -> torch.Tensor:
    """Returns keys as DeepSeek's caches hold them, [B, N, 656]: 512 numbers of e4m3, 4 scales of f32, and 64
    numbers of bf16.
    """
    if not cell.latent or cell.queries > 1 or (cell.width, cell.value) != (576, 512):
        raise Unavailable(
            "rows of 656 bytes are compared where single tokens of DeepSeek's models are decoded"
        )
    k = x.k[:, :, 0]
    held = torch.empty(*k.shape[:2], 656, dtype=torch.uint8, device=k.device)
    held[..., :512] = k[..., :512].to(torch.float8_e4m3fn).view(torch.uint8)
    held[..., 512:528].view(torch.float32).fill_(1.0)
    held[..., 528:].view(torch.bfloat16).copy_(k[..., 512:])
    return held


def _call_attnc_on_rows(cell: ListCell, x: ListInputs) -> Launch:
    held = _store_rows(cell, x)
    compiled = attnc.compile(_ROWS, target="cuda.sm_90a")
    return partial(
        compiled,
        q=x.q,
        k=held[..., None, :512].view(torch.float8_e4m3fn),
        scale=held[..., 512:528].view(torch.float32),
        rope=held[..., 528:].view(torch.bfloat16),
        idx=x.idx[:, 0],
    )


_ROWS = """attention rows {
  input q: bf16[B, M, G, 576]
  input k: e4m3[B, N, 1, 512]
  input v: e4m3[B, N, 1, 512] via prefix(k)
  input scale: f32[B, N, 4]
  input rope: bf16[B, N, 64]
  input idx: i32[B, M, S]
  score = dot(q, cat(k * scale[b, kv_idx, d // 128], rope[b, kv_idx, d])) / 24
  mask = listed(idx[b, q_idx], keys = 1)
  normalize = softmax(v_scale = scale[b, kv_idx, d // 128])
  output o: bf16[B, M, G, 512]
}

schedule rows for cuda.sm_90a {
  loops = [kv], pack = gqa, tile.kv = 64, split.kv = auto
}
"""


def _flash_mla_on_rows(cell: ListCell, x: ListInputs) -> Launch:
    held = _store_rows(cell, x).view(-1, 64, 1, 656)
    if cell.heads not in (64, 128):
        raise Unavailable("FlashMLA's decoder takes 64 or 128 heads")
    run, named = _operators_of_flash_mla().sparse_decode_fwd, _name_rows(cell, x.idx)[:, :, 0]
    plan = run(x.q, held, named, *[None] * 7, cell.value, cell.width**-0.5)[2:]
    return partial(run, x.q, held, named, None, None, *plan, *[None] * 3, cell.value, cell.width**-0.5)


#: Those that read rows of 8 bits and 16, which are another attention's.
OF_ROWS = ("rows656", "flashmla_rows656")


PEERS: Mapping[str, ListPeer] = {
    peer.name: peer
    for peer in (
        ListPeer(name="flex", title="FlexAttention", make=_flex, compiles=True),
        ListPeer(name="fa4", title="FlashAttention-4", make=_flash4, compiles=True),
        ListPeer(name="nsa", title="parallel_nsa", make=_nsa, compiles=True),
        ListPeer(name="flashmla", title="FlashMLA", make=_flash_mla),
        ListPeer(name="rows656", title="attnc, rows of 656 bytes", make=_call_attnc_on_rows, compiles=True),
        ListPeer(name="flashmla_rows656", title="FlashMLA, rows of 656 bytes", make=_flash_mla_on_rows),
    )
}
