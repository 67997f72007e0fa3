"""Masks, of positions and of captured tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from tests.flex.cases import INF, Mod, Setting, causal, mask, refused, score


@mask
def causal_mask(s: Setting) -> Mod:
    return causal


@mask
def nothing_masked(s: Setting) -> Mod:
    return noop_mask


@mask
def inverse_causal_mask(s: Setting) -> Mod:
    return lambda b, h, q, kv: q <= kv


@mask
def sliding_window(s: Setting) -> Mod:
    width = 9
    return and_masks(lambda b, h, q, kv: q - kv <= width, causal)


@mask
def prefix_lm(s: Setting) -> Mod:
    length = 13
    return or_masks(lambda b, h, q, kv: kv < length, causal)


@mask
def dilated_window(s: Setting) -> Mod:
    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = torch.abs(q - kv)
        return (distance <= 12) & ((distance % 3) == 0)

    return mod


@mask
def sinks_and_window(s: Setting) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (q - kv < 10))


@mask
def global_and_local(s: Setting) -> Mod:
    return lambda b, h, q, kv: (kv < 3) | (q < 3) | ((q - kv).abs() <= 5)


@mask
def chunks(s: Setting) -> Mod:
    return lambda b, h, q, kv: (q // 16 == kv // 16) & (q >= kv)


@mask
def batched_tokens(s: Setting) -> Mod:
    size = 16

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // size == kv // size) & causal(b, h, q % size, kv % size)

    return mod


@mask
def rows_without_keys(s: Setting) -> Mod:
    half = s.S // 2
    return lambda b, h, q, kv: q < half


@mask
def every_other_sequence(s: Setting) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (b % 2 == 0)


@mask
def two_ranges(s: Setting) -> Mod:
    return lambda b, h, q, kv: (kv < 5) | (kv >= 40)


@mask
def not_the_window(s: Setting) -> Mod:
    return lambda b, h, q, kv: ~((q - kv).abs() < 6) & (q >= kv)


@mask
def nothing_kept(s: Setting) -> Mod:
    return and_masks(causal, lambda b, h, q, kv: q < kv)


@mask
def neighbourhood(s: Setting) -> Mod:
    """A square around the query in an image of 8 columns, moved inside at its edges."""
    width, height, radius = 8, s.S // 8, 1

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = (q // width).clamp(radius, height - 1 - radius)
        y = (q % width).clamp(radius, width - 1 - radius)
        return ((x - kv // width).abs() <= radius) & ((y - kv % width).abs() <= radius)

    return mod


@mask
def tiled_neighbourhood(s: Setting) -> Mod:
    """The same where the pixels of a tile of 2 x 4 follow each other."""
    width, height, rows, columns, radius = 8, s.S // 8, 2, 4, 1

    def place(index: Any) -> Any:
        tile, inside = index // (rows * columns), index % (rows * columns)
        x = tile % (width // columns) * columns + inside % columns
        return x, tile // (width // columns) * rows + inside // columns

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        (q_x, q_y), (kv_x, kv_y) = place(q), place(kv)
        x, y = q_x.clamp(radius, width - 1 - radius), q_y.clamp(radius, height - 1 - radius)
        return ((x - kv_x).abs() <= radius) & ((y - kv_y).abs() <= radius)

    return mod


@refused("'|' of these integers")
def morton_neighbourhood(s: Setting) -> Mod:
    """The same where the bits of row and column alternate."""

    def every_other_bit(code: Any) -> Any:
        code = code & 0x55555555
        code = (code | (code >> 1)) & 0x33333333
        return (code | (code >> 2)) & 0x0F0F0F0F

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        columns = (every_other_bit(q) - every_other_bit(kv)).abs() <= 1
        return columns & ((every_other_bit(q >> 1) - every_other_bit(kv >> 1)).abs() <= 1)

    return mod


@mask
def sliding_tiles_2d(s: Setting) -> Mod:
    """A window of tiles of an image, then text that all see."""
    columns, tile, pixels = 2, 8, 32
    rows = pixels // tile // columns

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_y, q_x = q // tile // columns, q // tile % columns
        kv_y, kv_x = kv // tile // columns, kv // tile % columns
        y, x = q_y.clamp(0, rows - 1), q_x.clamp(0, columns - 1)
        near = (kv_y >= y) & (kv_y <= y) & (kv_x >= x) & (kv_x <= x + 1)
        image = (q < pixels) & (kv < pixels) & near
        to_text = (q < pixels) & (kv >= pixels) & (kv < pixels + 10)
        return image | to_text | ((q >= pixels) & (kv < pixels + 10))

    return mod


@mask
def sliding_tiles_3d(s: Setting) -> Mod:
    frames, rows, columns, tile = 3, 2, 2, 4

    def place(index: Any) -> Any:
        number = index // tile
        return number // (rows * columns), number % (rows * columns) // columns, number % columns

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        centre = [at.clamp(1, size - 1) for at, size in zip(place(q), (frames, rows, columns), strict=True)]
        near = [(kv_at >= at - 1) & (kv_at <= at) for kv_at, at in zip(place(kv), centre, strict=True)]
        return near[0] & near[1] & near[2]

    return mod


@mask
def video_space(s: Setting) -> Mod:
    prompt, frame = 5, 14
    return lambda b, h, q, kv: (q < prompt) | (kv < prompt + frame) | (torch.abs(q - kv) < 2 * frame)


@mask
def video_time(s: Setting) -> Mod:
    prompt, frame = 5, 14

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = torch.abs((q - prompt) % frame - (kv - prompt) % frame) < 3
        return (kv < prompt) | (q < prompt) | near

    return mod


@mask
def documents(s: Setting) -> Mod:
    document = s.documents()
    return lambda b, h, q, kv: document[q] == document[kv]


@mask
def documents_of_each_sequence(s: Setting) -> Mod:
    document = torch.stack([s.documents(), torch.zeros_like(s.documents())])
    return lambda b, h, q, kv: (document[b, q] == document[b, kv]) & (q >= kv)


@mask
def documents_in_any_order(s: Setting) -> Mod:
    document = s.documents().flip(0)
    return lambda b, h, q, kv: document[q] == document[kv]


@mask
def causal_inside_documents(s: Setting) -> Mod:
    document, offsets = s.documents(), s.offsets()

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = causal(b, h, q - offsets[document[q]], kv - offsets[document[kv]])
        return (document[q] == document[kv]) & inner

    return mod


@score
def nested_sequences(s: Setting) -> Mod:
    document, offsets = s.documents(), s.offsets()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q - offsets[document[q]] >= kv - offsets[document[kv]], score, -INF)

    return mod


@mask
def padding(s: Setting) -> Mod:
    length = s.ints([s.S - 11 * b for b in range(s.B)], dtype=torch.int64)
    return lambda b, h, q, kv: (q < length[b]) & (kv < length[b])


@mask
def padding_by_partial(s: Setting) -> Mod:
    def mod(b: Any, h: Any, q: Any, kv: Any, lengths: Any) -> Any:
        return (q < lengths[b]) & (kv < lengths[b])

    return partial(mod, lengths=s.ints([s.S - 11 * b for b in range(s.B)]))


@mask
def offset_causal(s: Setting) -> Mod:
    offset = s.ints([3 * b for b in range(s.B)])
    return lambda b, h, q, kv: (q + offset[b]) >= kv


@mask
def images_in_text(s: Setting) -> Mod:
    """Text is causal, the tokens of an image see each other."""
    image = torch.full((s.S,), -1, device=s.device, dtype=torch.int32)
    image[8:20], image[30:37] = 0, 1
    return lambda b, h, q, kv: (q >= kv) | ((image[q] == image[kv]) & (image[q] >= 0))


@mask
def cross_attention_to_images(s: Setting) -> Mod:
    intervals = s.ints([[0, 30], [10, 30], [30, s.S]])
    image = torch.arange(s.S, device=s.device) * 3 // s.S

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        interval = intervals[image[kv]]
        return (q >= interval[0]) & (q < interval[1])

    return mod


@mask
def dense_mask(s: Setting) -> Mod:
    kept = torch.ones(s.B, 1, s.S, s.S, device=s.device, dtype=torch.bool).tril(3)

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kept[b, h.new_zeros(h.shape), q, kv]

    return mod


@mask
def rows_by_flag(s: Setting) -> Mod:
    dropped = torch.arange(s.B * s.S, device=s.device).view(s.B, s.S) % 3 == 0
    return lambda b, h, q, kv: ~dropped[b, q]


@mask
def window_of_each_head(s: Setting) -> Mod:
    reach = s.ints([4 * (h + 1) for h in range(s.H)])
    return lambda b, h, q, kv: torch.where(h < 2, q - kv <= reach[h], True) & (q >= kv)


@mask
def tree_of_drafts(s: Setting) -> Mod:
    """A token sees its ancestors: those whose interval of visits holds its own first visit."""
    first = torch.arange(s.S, device=s.device, dtype=torch.int32)
    last = torch.clamp(first + 5 + first % 7, max=s.S).int()
    return lambda b, h, q, kv: (first[kv] <= first[q]) & (first[q] < last[kv])
