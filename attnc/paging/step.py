"""What a step over pages gives to kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What kernels take for B sequences to which T tokens were appended, on the cache's device.

    block_table: i32[B, P]; entries past a sequence's last page are meaningless
    kv_len: i32[B], with the new tokens
    cu_q: i32[B + 1]; the new tokens of sequence b are cu_q[b] .. cu_q[b + 1] - 1
    slots: i64[T], page * page size + row: where each new token's keys and values belong
    counts: i32[B]; the rows of each sequence that are this rank's, where ranks share them (else None)
    own: then which of the new tokens are this rank's, ascending, i64; slots has these alone
    """

    block_table: torch.Tensor
    kv_len: torch.Tensor
    cu_q: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor | None = None
    own: torch.Tensor | None = None
