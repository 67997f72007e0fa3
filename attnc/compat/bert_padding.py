"""flash-attention's functions between padded batches and packed sequences, which its packed functions take.

from attnc.compat.bert_padding import pad_input, unpad_input    # for: from flash_attn.bert_padding import ...
"""

from __future__ import annotations

import torch

from attnc.api.tensors import FLOATS, INTEGERS, GivenTensors
from attnc.support.arguments import check_dense

#: What masks may be made of: bools, or 0 and 1.
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, *INTEGERS, *FLOATS, torch.float64)


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the rows [T, ...] of input: [R, ...] that indices: i32 or i64[T] name, with a gradient."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Returns [first_axis_dim, ...] of zeros, in which the rows that indices: i32 or i64[T] name are those of
    values: [T, ...], with a gradient.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Returns the rows of a padded batch that a mask keeps, end to end, [T, ...]; their places in the flat
    batch, i64[T]; where sequences begin, i32[B + 1]; the longest one; how many rows of each count, i32[B].

    hidden_states: [B, N, ...]; attention_mask: [B, N], bools or 0 and 1; unused_mask: likewise, rows that are
    kept and do not count. Waits for the device, as flash-attention's does. TypeError and ValueError name the
    argument.
    """
    given = GivenTensors("unpad_input")
    given.check("attention_mask", attention_mask, "B N", _MASKS)
    kept = attention_mask != 0
    counted = kept.sum(1, dtype=torch.int32)
    if unused_mask is not None:
        given.check("unused_mask", unused_mask, "B N", _MASKS)
        kept = kept | (unused_mask != 0)
    _check_rows(hidden_states, kept)
    rows = kept.sum(1, dtype=torch.int32)
    return (*_unpad(hidden_states, kept), *_starts(rows), counted)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns `unpad_input` but for its last result, of rows that hold several sequences each.

    hidden_states: [B, N, ...]; attention_mask_in_length: i[B, N], the lengths of the sequences of a row, and
    behind them 0
    """
    GivenTensors("unpad_input_for_concatenated_sequences").check(
        "attention_mask_in_length", attention_mask_in_length, "B N", INTEGERS
    )
    lengths = attention_mask_in_length
    kept = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(1, keepdim=True)
    _check_rows(hidden_states, kept)
    return (*_unpad(hidden_states, kept), *_starts(lengths[lengths != 0].int()))


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Returns the padded batch [batch, seqlen, ...] of packed rows, hidden_states: [T, ...], whose places are
    indices: i32 or i64[T], of `unpad_input`; other rows are 0.
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])


def _check_rows(hidden_states: torch.Tensor, kept: torch.Tensor) -> None:
    check_dense("hidden_states", hidden_states)
    if hidden_states.shape[:2] != kept.shape:
        came = f"got {list(hidden_states.shape)}"
        raise ValueError(f"hidden_states: expected shape {[*kept.shape]} and more axes, {came}")


def _unpad(hidden_states: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices = kept.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices


def _starts(lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns where sequences begin and end, and the longest."""
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return ends, int(lengths.max()) if len(lengths) else 0
