"""What a call of `flex_attention` was given: checked, in torch's words where its function checks it too."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from attnc.flex.blocks import Blocks, blocks_of, check_blocks
from attnc.flex.spec import DTYPES, NARROW
from attnc.flex.trace import MaskMod
from attnc.support.arguments import check_dense

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> dict[str, int]:
    """Returns B, H, M and N, after checking what the kernel cannot say in the caller's terms."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: expected a tensor [B, H, length, D], got shape {list(x.shape)}")
    _check_types(query, key, value)
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
    if Hkv == 0:
        raise ValueError("key: expected at least one head, got none")
    if H % Hkv:
        raise ValueError(f"query: expected a multiple of the {Hkv} heads of key, got {H}")
    return {"B": B, "H": H, "M": M, "N": N}


def _check_types(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.dtype not in DTYPES:
        raise TypeError(f"query: expected dtype {', '.join(map(str, DTYPES))}, got {query.dtype}")
    is_quantised = key.dtype == value.dtype and key.dtype in NARROW
    if not is_quantised and not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "Expected query, key, and value to have the same dtype, or key and value one of"
            f" {', '.join(map(str, NARROW))}, but got query.dtype: {query.dtype}, key.dtype: {key.dtype}, and"
            f" value.dtype: {value.dtype} instead."
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            "Expected query, key, and value to have the same device type, but got query.device:"
            f" {query.device}, key.device: {key.device}, and value.device: {value.device} instead."
        )


def mask_of(
    block_mask: BlockMask | None, mask_mod: MaskMod | None, query: torch.Tensor, key: torch.Tensor
) -> tuple[MaskMod | None, Blocks | None]:
    """Returns the condition under which a key is kept, None for always, and the blocks in which it can be."""
    if block_mask is None:
        return mask_mod, None
    if mask_mod is not None:
        raise ValueError("mask_mod: expected None beside a block_mask, which has its own")
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a BlockMask of torch's, got {type(block_mask).__name__}")
    mod: MaskMod = block_mask.mask_mod
    if (
        getattr(mod, "__name__", "") == "_sliced_mask_mod_error"
    ):  # torch's stand-in for one that no longer fits
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask: set that of the slice")
    check_blocks(block_mask, query, key)
    return (None if mod is noop_mask else mod), blocks_of(block_mask)


class Auxiliary:
    """What a call returns besides o.

    lse, max_scores: whether they are computed
    """

    def __init__(self, return_lse: bool, return_aux: Any) -> None:
        if return_lse and return_aux is not None:
            raise ValueError(
                "Cannot specify both return_lse and return_aux: write return_aux=AuxRequest(lse=True)"
            )
        self.is_named = return_aux is not None
        self.lse = bool(return_aux.lse if self.is_named else return_lse)
        self.max_scores = self.is_named and bool(getattr(return_aux, "max_scores", False))
        if return_lse and not torch.compiler.is_compiling():
            message = "return_lse is deprecated by torch: write return_aux=AuxRequest(lse=True)"
            warnings.warn(message, FutureWarning, stacklevel=3)

    def arrange_results(self, o: Any, lse: Any, max_scores: Any) -> Any:
        if not self.is_named:
            return (o, lse) if self.lse else o
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=lse, max_scores=max_scores)
