"""Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864) as flash-attention applies it to what a
cache is extended by: the new keys, and the queries. Nothing waits for the device.
"""

from __future__ import annotations

import torch

from attnc.api.tensors import GivenTensors


def find_rows(
    x: torch.Tensor, starts: torch.Tensor | None, sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which sequence each row of x is of, and which of its rows, i64[T]: of [B, rows, ...], or with
    starts: i32[B + 1] of sequences end to end, [T, ...]. Rows behind the last sequence count as its own.
    """
    if starts is None:
        count, rows = x.shape[:2]
        sequence = torch.arange(count, device=x.device).repeat_interleave(rows)
        return sequence, torch.arange(rows, device=x.device).repeat(count)
    tokens = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).clamp(max=sequences - 1)
    return sequence, tokens - starts[sequence]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Returns x with the pairs of its first columns rotated, computed in float32, in the type of x.

    x: [..., H, D]; cos, sin: [positions there are, R / 2], R <= D: angles of the R / 2 pairs
    positions: i64 of all rows of x, flat; one behind the last counts as the last
    interleaved: columns 2 i and 2 i + 1 are a pair (GPT-J), else i and i + R / 2 (GPT-NeoX)
    """
    half = cos.shape[1]
    at = positions.clamp(0, len(cos) - 1)
    c, s = (angle[at].float().view(*x.shape[:-2], 1, half) for angle in (cos, sin))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    sizes = (half, 2) if interleaved else (2, half)
    pairs = turned.reshape(*x.shape[:-1], *sizes).float()
    first, second = pairs.unbind(-1 if interleaved else -2)
    made = torch.stack((first * c - second * s, first * s + second * c), -1 if interleaved else -2)
    return torch.cat((made.flatten(-2).to(x.dtype), rest), -1)


def rotate_new(
    given: GivenTensors,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    lengths: torch.Tensor,
    *,
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    interleaved: bool,
    walks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k rotated: row i of sequence b by its position, lengths[b] + i.

    walks: whether rows of q do so too; else all are at position lengths[b], as flash-attention has it where
    no mask tells them apart. The rest as of `rotate` and `find_rows`. TypeError and ValueError name the
    argument.
    """
    types = tuple(dict.fromkeys((q.dtype, torch.float32)))
    given.check("rotary_cos", cos, "positions half", types)
    given.check_range("rotary_cos", "half", 1, min(q.shape[-1], k.shape[-1]) // 2)
    given.check_range("rotary_cos", "positions", 1)
    given.check("rotary_sin", sin, "positions half", types)
    made = []
    for x, starts, is_turned in ((q, starts_q, walks), (k, starts_k, True)):
        sequence, row = find_rows(x, starts, len(lengths))
        positions = lengths[sequence] + row if is_turned else lengths[sequence]
        made.append(rotate(x, cos, sin, positions, interleaved))
    return made[0], made[1]
