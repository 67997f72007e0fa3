"""Bugs planted in stick-breaking."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="the first key first",
        attention="stick_breaking",
        story="the sum ran over the keys before, and recent keys got what old ones had left",
        anchor="after = tl.cumsum(left, 1, reverse=True)",
        patch="after = tl.cumsum(left, 1)",
    ),
    TritonBug(
        name="a key that leaves its own share to itself",
        attention="stick_breaking",
        story="log sigmoid(z) is z less what the key leaves, which was taken for what others leave",
        anchor="p = tl.exp2(z - after)",
        patch="p = tl.exp2(z - after + left)",
    ),
    TritonBug(
        name="earlier tiles of the whole stick",
        attention="stick_breaking",
        story="a tile of later keys took its share, and what earlier ones had was not made less",
        anchor="acc * tl.exp2(-broken)[:, None]",
        patch="acc",
    ),
    TritonBug(
        name="excluded keys break off halves",
        attention="stick_breaking",
        story="a score of 0 was thought to count nothing, as in other forms",
        anchor='s = tl.where(keep, s, -float("inf"))',
        patch="s = tl.where(keep, s, 0.0)",
    ),
    TritonBug(
        name="what is left in base 2",
        attention="stick_breaking",
        story="lse is a natural logarithm",
        anchor="-rest * LN2",
        patch="-rest",
    ),
    TritonBug(
        name="what the first tile leaves, behind all",
        attention="stick_breaking",
        story="the backward walked from the first tile to the last, as its forward does",
        anchor="kv_lo = (tiles - 1 - done) * BLOCK_N",
        patch="kv_lo = done * BLOCK_N",
        phase="backward",
    ),
    TritonBug(
        name="a tile behind itself",
        attention="stick_breaking",
        story="what a tile leaves was added before the sum behind it was written",
        anchor="M_padded, rest, mask=q_idx < M)",
        patch="M_padded, rest + tl.sum(left, 1), mask=q_idx < M)",
        phase="backward",
    ),
    TritonBug(
        name="each tile from nothing",
        attention="stick_breaking",
        story="a key takes of later ones what they would have had, and earlier tiles were forgotten",
        anchor="before += tl.sum(given, 1)",
        patch="before = tl.sum(given, 1)",
        phase="backward",
    ),
    TritonBug(
        name="keys up to the one before",
        attention="stick_breaking",
        story="an exclusive sum: the key's own share was left out",
        anchor="ds = given - tl.exp2(z - left) * (before[None, :] + tl.cumsum(given, 0))",
        patch="ds = given - tl.exp2(z - left) * (before[None, :] + tl.cumsum(given, 0) - given)",
        phase="backward",
    ),
    TritonBug(
        name="keys summed in the order of the forward",
        attention="stick_breaking",
        story="what a key leaves reaches those before it; gradients of scores come from those before, too",
        anchor="(before[:, None] + tl.cumsum(given, 1))",
        patch="(before[:, None] + tl.cumsum(given, 1, reverse=True))",
        phase="backward",
    ),
    TritonBug(
        name="a gradient of what is left that nobody adds",
        attention="stick_breaking",
        story="lse is an output like o",
        anchor="before += tl.load(dlse_head + q_idx.to(tl.int64) * stride_dlsem, mask=q_idx < M, other=0.0)",
        patch="pass",
        phase="backward",
    ),
    TritonBug(
        name="sums of the first head for all",
        attention="stick_breaking",
        story="the place of a tile's sums was found once, before the loop over the heads of a group",
        anchor="before_tile = before_ptr + first_row * EDGES",
        patch="before_tile = before_ptr + (b * H + h_kv * G).to(tl.int64) * M_padded * EDGES",
        phase="backward",
    ),
)
