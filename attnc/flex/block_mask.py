"""What a BlockMask of torch's means: its mask_mod, or its blocks where it has nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnc.flex.trace import MaskMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def mask_mod_of(block_mask: BlockMask, sizes: Mapping[str, int]) -> MaskMod | None:
    """The condition under which a key is kept. ValueError for a mask of other lengths.

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
