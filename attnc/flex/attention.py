"""`flex_attention`: torch's function of this name, on a kernel that the mods are compiled to. A BlockMask of
torch's means its mask_mod, or its blocks where it has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnc.flex.programs import kernel_of, read_options, targets_of
from attnc.flex.spec import DTYPES, Layout
from attnc.flex.trace import MaskMod, ScoreMod, trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    from attnc.api.family import Family


def mask_mod_of(block_mask: BlockMask, sizes: Mapping[str, int]) -> MaskMod | None:
    """Returns the condition under which a key is kept. ValueError for a mask of other lengths.

    A mask that was made of blocks alone (`BlockMask.from_kv_blocks` without a mask_mod) is looked up block by
    block.
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a BlockMask of torch's, got {type(block_mask).__name__}")
    mod: MaskMod = block_mask.mask_mod
    if mod is not noop_mask:
        return mod
    blocks = block_mask.to_dense().bool()
    if blocks.shape[-2:] == (1, 1):
        return None
    rows, columns = block_mask.BLOCK_SIZE
    if blocks.shape[-2] * rows < sizes["M"] or blocks.shape[-1] * columns < sizes["N"]:
        lengths = [blocks.shape[-2] * rows, blocks.shape[-1] * columns]
        raise ValueError(f"block_mask: expected blocks for lengths {[sizes['M'], sizes['N']]}, got {lengths}")
    of_one, of_one_head = blocks.shape[0] == 1, blocks.shape[1] == 1

    def in_block(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = blocks[0] if of_one else blocks
        own = own.select(-3, 0) if of_one_head else own
        index = [*([] if of_one else [b]), *([] if of_one_head else [h]), q_idx // rows, kv_idx // columns]
        return own[tuple(index)]

    return in_block


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: MaskMod | None = None,
    target: str | None = None,
) -> Any:
    """Computes attention whose scores and mask are functions of positions:
    `torch.nn.attention.flex_attention`'s.

    query: [B, Hq, M, D]; key: [B or 1, Hkv, N, D]; value: [B or 1, Hkv, N, Dv]; of float16, bfloat16 or
        float32; any strides but a contiguous last axis, without which it is copied
    score_mod(score, b, h, q_idx, kv_idx): the score in place of `score`, the product times `scale`
    mask_mod(b, h, q_idx, kv_idx): whether the key is kept; block_mask: of torch's, instead: its mask_mod,
        without a look at its blocks where it has one
    scale: 1 / sqrt(D) if None; enable_gqa: Hq may be a multiple of Hkv
    return_lse: (o, lse) instead of o; return_aux: the same by torch's AuxRequest, lse alone
    kernel_options: BLOCK_M, BLOCK_N, num_warps and num_stages, of the forward kernel
    target: of `attnc.compile`; None for the fastest that the GPU runs

    o: [B, Hq, M, Dv], laid out as query; lse: f32[B, Hq, M], natural logarithm. Differentiable in query, key,
    value and captured tensors of floats. Mods are read at every call; what they say is compiled once,
    whatever the lengths, the data of captured tensors and (after the fourth) the numbers.

    Raises FlexError, with the place in the caller's file, for what no spec can say; ValueError and TypeError
    that name an argument, what was expected and what came.
    """
    sizes = _check(query, key, value, enable_gqa)
    mods = _mods(score_mod, block_mask, mask_mod, sizes)
    lse, wrapped = _wants_lse(return_lse, return_aux)
    query, key, value = _laid_out(query, key, value)
    if torch.compiler.is_compiling():
        from attnc.flex.compiled import attend

        o, log_sum = attend(query, key, value, *mods, scale, lse, _rows_first(query), kernel_options, target)
        return wrapped(o, log_sum)
    traced = trace(*mods, scale=scale, sizes=sizes, device=query.device)
    layout = _layout(query, key, value, scale, lse, kernel_options, target)
    kernel = kernel_of(traced, layout, mods)
    arguments = kernel.arguments(traced)
    try:
        found = kernel.function(query, key, value, *arguments)
    except RuntimeError:
        _refuse_transforms(query, key, value, *arguments)
        raise
    o, log_sum = found if lse else (found, None)
    if layout.rows_first:
        o = o.transpose(1, 2)
    return wrapped(o, log_sum)


def family_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    target: str | None = None,
) -> Family:
    """Returns the kernels that `flex_attention` runs on for these arguments, to be read: `spec`, `source`,
    `target`, `explain()`. Nothing is run. Raises what `flex_attention` raises.
    """
    sizes = _check(query, key, value, enable_gqa)
    mods = _mods(score_mod, block_mask, mask_mod, sizes)
    query, key, value = _laid_out(query, key, value)
    traced = trace(*mods, scale=scale, sizes=sizes, device=query.device)
    layout = _layout(query, key, value, scale, return_lse, kernel_options, target)
    return kernel_of(traced, layout, mods).family


def _mods(
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    mask_mod: MaskMod | None,
    sizes: dict[str, int],
) -> tuple[ScoreMod | None, MaskMod | None]:
    if block_mask is None:
        return score_mod, mask_mod
    if mask_mod is not None:
        raise ValueError("mask_mod: expected None beside a block_mask, which has its own")
    return score_mod, mask_mod_of(block_mask, sizes)


def _laid_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v with as many sequences each and with last axes that are contiguous."""
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> dict[str, int]:
    """Returns B, H, M and N, after checking what the kernel cannot say in the caller's terms."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise TypeError(f"{name}: expected a dense tensor, got {kind}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected a tensor [B, H, length, D], got shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected dtype {', '.join(map(str, DTYPES))}, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name}: expected dtype {query.dtype}, like query, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name}: expected device {query.device}, like query, got {x.device}")
    (B, H, M, D), (Bkv, Hkv, N, Dk), (Bv, Hv, Nv, _) = (x.shape for x in named.values())
    if Bkv not in (1, B) or Bv != Bkv:
        raise ValueError(f"key, value: expected a batch of {B}, like query, or 1, got {Bkv} and {Bv}")
    for name, width in (("query", D), ("value", value.shape[3])):
        if not width:
            raise ValueError(f"{name}: expected rows of at least one element, got {list(named[name].shape)}")
    if Dk != D:
        raise ValueError(f"key: expected rows of {D}, like query, got {Dk}")
    if (Hv, Nv) != (Hkv, N):
        raise ValueError(f"value: expected heads and length {[Hkv, N]}, like key, got {[Hv, Nv]}")
    if Hkv != H and not enable_gqa:
        raise ValueError(f"enable_gqa: expected True where query has {H} heads and key {Hkv}, got False")
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"query: expected a multiple of the {Hkv} heads of key, got {H}")
    return {"B": B, "H": H, "M": M, "N": N}


def _refuse_transforms(*arguments: Any) -> None:
    """Raises RuntimeError inside of torch.vmap and of torch.func's derivatives, which kernels do not see
    through.
    """
    for x in arguments:
        if isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise RuntimeError(
                "flex_attention: expected plain tensors, got those of torch.vmap or torch.func: put the axis"
                " that is mapped into the batch, and take gradients by torch.autograd"
            ) from None


def _wants_lse(return_lse: bool, return_aux: Any) -> tuple[bool, Callable[[Any, Any], Any]]:
    """Returns whether lse is computed, and what is made of the results."""
    if return_aux is not None:
        if getattr(return_aux, "max_scores", False):
            raise ValueError("return_aux: max_scores: expected False, as it is not computed, got True")
        from torch.nn.attention.flex_attention import AuxOutput

        return bool(return_aux.lse), lambda o, lse: (o, AuxOutput(lse=lse, max_scores=None))
    if return_lse:
        return True, lambda o, lse: (o, lse)
    return False, lambda o, lse: o


def _layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    lse: bool,
    kernel_options: Mapping[str, Any] | None,
    target: str | None,
) -> Layout:
    wants = torch.is_grad_enabled()
    wanted = read_options(kernel_options)
    tensors = (("q", query), ("k", key), ("v", value))
    grad = tuple(name for name, x in tensors if wants and x.requires_grad)
    target, otherwise = targets_of(target, query, key, value, wanted, gradients=bool(grad))
    return Layout(
        dtype=DTYPES[query.dtype],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        grouped=query.shape[1] != key.shape[1],
        rows_first=_rows_first(query),
        scaled=scale is not None,
        lse=lse,
        differentiable=wants,
        grad=grad,
        target=target,
        otherwise=otherwise,
        wanted=wanted,
    )


def _rows_first(query: torch.Tensor) -> bool:
    """Returns whether the rows of all heads at a position lie together, as in a transposed [B, M, H, D]."""
    _, heads, rows, _ = query.stride()
    return rows > heads and query.shape[2] > 1 and query.shape[1] > 1
