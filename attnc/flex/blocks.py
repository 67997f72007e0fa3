"""The lists of blocks of a BlockMask, as part of a mask.

torch computes the blocks that are listed and no others: those of the first list where the mask_mod holds,
those of the second (full ones) everywhere. Lists that `create_block_mask` made say nothing that the mask_mod
does not say, and tiles are skipped for a mask_mod alone. So the data is looked at, once for lists and tensors
that stay as they are; lists that say more become a table of blocks, which the kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attnc.flex.dense import loads, reads, rows_at_once, values
from attnc.flex.operations import floor_divide, integer, logical_and, logical_or
from attnc.flex.symbols import Scalar, subscript
from attnc.flex.tape import Tape, remember
from attnc.flex.trace import Trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """counts: i32[B or 1, H or 1, block rows], how many of a row's indices count; indices: i32[..., block
    rows, block columns]; full_counts, full_indices: the same of full blocks; rows, columns: of a block.
    """

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None
    rows: int
    columns: int

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.counts, self.indices, self.full_counts, self.full_indices) if x is not None]


def blocks_of(block_mask: BlockMask) -> Blocks:
    """Returns the lists of a BlockMask, with an axis of block rows where an index took the only one."""
    rows, columns = block_mask.BLOCK_SIZE
    counts, full = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    lists: list[Any] = [counts, block_mask.kv_indices, full, block_mask.full_kv_indices]
    if counts.dim() == 2:
        lists = [None if x is None else x.unsqueeze(2) for x in lists]
    return Blocks(lists[0], lists[1], lists[2], lists[3], rows, columns)


@dataclass(frozen=True, slots=True)
class _Tables:
    """listed, full: bool[B or 1, H or 1, block rows, block columns]: where the mask_mod holds, and where all
    keys are kept; None where that says nothing more than the mask_mod. lists: i32 of the same shape, but for
    the last axis, of each row the blocks that are in either, and then -1.
    """

    listed: Tensor | None
    full: Tensor | None
    lists: Tensor


def restrict(traced: Trace, blocks: Blocks) -> Trace:
    """Returns a trace of the mods that is restricted to the keys in these blocks."""
    tape = traced.tape
    tensors = [*blocks.tensors, *loads(tape, traced.mask)]
    sizes = (blocks.rows, blocks.columns, *tape.sizes.items())
    what = ("blocks", traced.mask, tape.key, tuple(tape.numbers), *sizes)
    tables = remember(tensors, what, lambda: _compare_tables(traced, blocks), None)
    if tables is None:  # not to be seen now
        tables = _tables(blocks, tape.constant(traced.mask) is True)
    mask: Any = Scalar(tape, traced.mask)
    if blocks.rows % _TILE or blocks.columns % _TILE or max(blocks.rows, blocks.columns) >= _WHOLE:
        for name, table, join in (
            ("partial", tables.listed, logical_and),
            ("full", tables.full, logical_or),
        ):
            if table is not None:
                mask = join(tape, mask, _looked_up(tape, table, blocks, name))
        return Trace(tape, traced.score, mask.at)
    listed = _trace_list(tape, tables.lists, blocks)
    if tables.full is not None:
        if tables.listed is not None:
            mask = logical_and(tape, mask, _looked_up(tape, tables.listed, blocks, "partial"))
        mask = logical_or(tape, mask, _looked_up(tape, tables.full, blocks, "full"))
    if tables.listed is None and tables.full is None:
        return Trace(tape, traced.score, mask.at, listed.at)
    return Trace(tape, traced.score, logical_and(tape, listed, mask).at)


def _tables(blocks: Blocks, keeps_all: bool) -> _Tables:
    """Returns the tables of lists that are not looked at. keeps_all: whether the mask_mod is always true."""
    listed = _table(blocks.counts, blocks.indices)
    if blocks.full_counts is None or blocks.full_indices is None:
        return _Tables(listed, None, _list(listed))
    full = _table(blocks.full_counts, blocks.full_indices)
    either = listed | full
    lists = _list(either)
    return _Tables(either, None, lists) if keeps_all else _Tables(listed, full, lists)


def _list(table: Tensor) -> Tensor:
    columns = torch.arange(table.shape[-1], device=table.device, dtype=torch.int32)
    found = torch.where(table, columns, table.shape[-1]).sort(-1).values
    return torch.where(found < table.shape[-1], found, -1).contiguous()


def _table(counts: Tensor, indices: Tensor) -> Tensor:
    """Returns which blocks are listed. Indices behind a row's count may be anything; those of no block list
    nothing, such as the -1 of a page that is not there.
    """
    columns = indices.shape[-1]
    counted = torch.arange(columns, device=indices.device) < counts[..., None]
    is_block = (indices >= 0) & (indices < columns)
    at = torch.where(counted & is_block, indices.long(), columns)
    table = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool)
    return table.scatter_(-1, at, True)[..., :columns].contiguous()


def _compare_tables(traced: Trace, blocks: Blocks) -> _Tables:
    """Returns the tables that say more than the mask_mod: of blocks, where it holds in others; of full ones,
    where it does not hold in all of one.
    """
    tape = traced.tape
    keeps_all = tape.constant(traced.mask) is True
    tables = _tables(blocks, keeps_all)
    assert tables.listed is not None
    R, C = tables.listed.shape[-2:]
    counts = _kept_in_blocks(traced, blocks.rows, blocks.columns, R, C)
    anywhere, everywhere = counts
    allowed = tables.listed if tables.full is None else tables.listed | tables.full
    is_covered = ~(anywhere & ~allowed).any()
    agrees = torch.ones_like(is_covered) if tables.full is None else ~(tables.full & ~everywhere).any()
    longest = torch.nn.functional.pad((tables.lists >= 0).sum(-1).flatten(), (0, 1)).max()
    covered, same, most = torch.stack([is_covered, agrees, longest]).tolist()
    lists = _shorten(tables.lists, most)
    if covered and same:
        return _Tables(None, None, lists)
    return _Tables(allowed if same else tables.listed, None if same else tables.full, lists)


def _shorten(lists: Tensor, most: int) -> Tensor:
    """Returns lists without places that none of them needs: gradients make room for all. most: blocks of the
    longest list; others of about that size get lists of one shape.
    """
    return lists[..., : -(-max(most, 1) // _STEP) * _STEP].contiguous()


def _kept_in_blocks(traced: Trace, rows: int, columns: int, R: int, C: int) -> tuple[Tensor, Tensor]:
    """Returns where the mask_mod holds anywhere in a block, and everywhere: bool[B or 1, H or 1, R, C]."""
    tape = traced.tape
    sizes, used = tape.sizes, reads(tape, traced.mask)
    B, H = (sizes[size] if name in used else 1 for size, name in (("B", "b"), ("H", "h")))
    N = sizes["N"]
    columns = min(columns, max(N, 1))
    kept = torch.zeros((B, H, R, C), dtype=torch.int32, device=tape.device)
    hidden = torch.zeros_like(kept)
    for first, last, indices in rows_at_once(tape, B * H):
        mask = values(tape, traced.mask, indices)
        mask = mask.expand(B, H, last - first, N)
        of_row = torch.arange(first, last, device=tape.device) // rows
        for counts, found in ((kept, mask), (hidden, ~mask)):
            padded = torch.nn.functional.pad(found, (0, C * columns - N)) if C * columns != N else found
            held = padded.reshape(B, H, last - first, C, columns).any(-1)
            counts.index_add_(2, of_row, held.int())
    return kept > 0, hidden == 0


def _looked_up(tape: Tape, table: Tensor, blocks: Blocks, name: str) -> Scalar:
    """Returns the element of a table that a pair lies in. name: of the table."""
    kv_idx = Scalar(tape, tape.add("int", "index", "kv_idx"), 0)
    table, index = _find_row(tape, table, blocks)
    index.append(floor_divide(tape, kv_idx, integer(tape, blocks.columns)))
    tape.named[id(table)] = name
    found: Scalar = subscript(tape, table, tuple(index))
    return found


def _trace_list(tape: Tape, lists: Tensor, blocks: Blocks) -> Scalar:
    lists, index = _find_row(tape, lists, blocks)
    tape.named[id(lists)] = "blocks"
    axes = tuple(_SIZES.get(tape.entries[one.at], "") for one in index)
    capture = tape.capture(lists, (*axes, ""))
    at = tape.add("bool", "listed", capture, tuple(one.at for one in index), blocks.columns)
    return Scalar(tape, at)


#: Sizes of axes, by the entry of the index along them.
_SIZES = {("index", "b"): "B", ("index", "h"): "H"}


def _find_row(tape: Tape, table: Tensor, blocks: Blocks) -> tuple[Tensor, list[Scalar]]:
    """Returns a table without the axes along which all is the same, and the indices of the row of a query."""
    b, h, q_idx = (Scalar(tape, tape.add("int", "index", index), 0) for index in ("b", "h", "q_idx"))
    index = [floor_divide(tape, q_idx, integer(tape, blocks.rows))]
    for axis, outer in ((1, h), (0, b)):
        if table.shape[axis] == 1:
            table = table.select(axis, 0)
        else:
            index.insert(0, outer)
    return table, index


def check_blocks(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Raises what torch raises for a mask of other lengths or of another device, and ValueError for one of
    other sequences or heads.
    """
    (B, H, M, _), N = query.shape, key.shape[2]
    device = block_mask.kv_num_blocks.device
    if device != query.device:
        raise RuntimeError(
            f"Expect q/k/v and block_mask to be on the same device but got {query.device} and {device}."
        )
    rows, columns = block_mask.BLOCK_SIZE
    (q_len, kv_len), counts = block_mask.seq_lengths, block_mask.kv_num_blocks
    has_lengths = rows < _WHOLE or columns < _WHOLE
    if has_lengths and (q_len != M or kv_len != N):
        raise ValueError(
            f"block_mask was created for lengths {[q_len, kv_len]}, got query and key of {[M, N]}: make one"
            " for these, or block_mask._adjust(q_len, kv_len), which keeps its upper left corner"
        )
    if counts.dim() != 3 and not (counts.dim() == 2 and q_len <= rows):
        raise ValueError(
            f"block_mask: expected lists of [B, H, {-(-q_len // rows)}] block rows, got {list(counts.shape)}:"
            " an index of one element takes its axis away, a slice leaves it"
        )
    for name, size, expected in zip(("sequences", "heads"), counts.shape, (B, H), strict=False):
        if size not in (1, expected):
            raise ValueError(f"block_mask: expected {name} 1 or {expected}, like query, got {size}")


#: Blocks of multiples of these are tiles of a kernel.
_TILE = 16
#: What places of lists are a multiple of, where there are so many blocks.
_STEP = 8
#: The size of the block of a mask without any: of `torch.nn.attention.flex_attention`.
_WHOLE = 1 << 30
