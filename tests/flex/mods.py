"""Mods of FlexAttention as people write them: those that torch's own tests and attention-gym are about.

Each case makes the mods for sizes and a device, with the tensors that they read; the text is ours, what they
compute is public. `refused` holds those that no spec can say, with the operation that is why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

Mod: TypeAlias = Callable[..., Any]
INF = float("inf")


@dataclass(slots=True)
class Setting:
    """Sizes of a call, and tensors for it; those that were learned get gradients."""

    B: int = 2
    H: int = 4
    S: int = 48
    device: str = "cpu"
    learned: list[torch.Tensor] = field(default_factory=list)
    seed: int = 0

    def floats(self, *shape: int, learned: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        made = torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_(learned)
        if learned:
            self.learned.append(made)
        return made

    def ints(self, *values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(*values, device=self.device, dtype=dtype)

    def documents(self) -> torch.Tensor:
        return (torch.arange(self.S, device=self.device) * 3 // self.S).int()

    def offsets(self) -> torch.Tensor:
        counts = torch.bincount(self.documents())
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


@dataclass(frozen=True, slots=True)
class Case:
    """make: (score_mod, mask_mod) for a setting; refused: the operation that no spec has."""

    name: str
    make: Callable[[Setting], tuple[Mod | None, Mod | None]]
    refused: str = ""


CASES: list[Case] = []


def score(make: Callable[[Setting], Mod] | None = None, *, refused: str = "") -> Any:
    """Adds a function that makes a score_mod."""
    if make is None:
        return partial(score, refused=refused)
    CASES.append(Case(make.__name__, lambda s: (make(s), None), refused))
    return make


def mask(make: Callable[[Setting], Mod] | None = None, *, refused: str = "") -> Any:
    """Adds a function that makes a mask_mod."""
    if make is None:
        return partial(mask, refused=refused)
    CASES.append(Case(make.__name__, lambda s: (None, make(s)), refused))
    return make


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


# --- scores of positions


@score
def identity(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score


@score
def doubled(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score * 2


@score
def squared(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score * score


@score
def causal_score(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.where(q >= kv, score, -INF)


@score
def inverse_causal_score(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.where(q <= kv, score, float("-inf"))


@score
def relative(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score + (q - kv)


@score
def relative_causal(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.where(q >= kv, score + (q - kv), -INF)


@score
def alibi(s: Setting) -> Mod:
    heads = s.H
    return lambda score, b, h, q, kv: score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / heads))


@score
def checkerboard(s: Setting) -> Mod:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = torch.where(torch.abs(kv - q) % 2 == 1, score * 0.5, score)
        return torch.where(torch.abs(kv - q) % 2 == 0, score * 2.0, score)

    return mod


@score
def odd_keys_left_out(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.where(kv % 2 == 0, score, -INF)


@score
def composed(s: Setting) -> Mod:
    def first(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + (q - kv)

    def second(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q <= kv, score, -INF)

    return lambda score, b, h, q, kv: second(first(score, b, h, q, kv), b, h, q, kv)


@score
def two_dimensional_cross(s: Setting) -> Mod:
    """Same row or column of an image, or nearly; with the true quotient, as torch's test has it."""

    def place(index: Any) -> Any:
        return index / 8, index % 8

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        (q_x, q_y), (kv_x, kv_y) = place(q), place(kv)
        near = ((q_x - kv_x).abs() <= 1) | ((q_y - kv_y).abs() <= 1)
        return torch.where(near, score, -INF)

    return mod


@score
def floor_division(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score - q // (1 + kv)


@score
def silu(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.nn.functional.silu(score)


@score
def softcap(s: Setting) -> Mod:
    cap = 20
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


@score
def gated(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.sigmoid(score) * score + torch.clamp(score, -1, 1)


@score
def many_functions(s: Setting) -> Mod:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = torch.minimum(torch.abs(q - kv), 9)
        return score / torch.sqrt(1.0 + distance) - torch.log2(2.0 + distance) + torch.exp(-distance / 4)

    return mod


@score
def batch_size_in_closure(s: Setting) -> Mod:
    batch = s.B
    return lambda score, b, h, q, kv: score + batch


@score(refused="'sin'")
def trigonometric(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.sin(score) + torch.cos(score)


@score(refused="'cos'")
def trigonometric_product(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.cos(score) * torch.sin(score)


@score
def autograd_function(s: Setting) -> Mod:
    class Masked(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(a: Any, keep: Any) -> Any:  # type: ignore[override]  # by setup_context
            return torch.where(keep, a, -INF)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(inputs[1])

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]  # of one output
            return gradient, None

    return lambda score, b, h, q, kv: Masked.apply(score, q <= kv)


# --- scores that read tensors


@score
def head_offset(s: Setting) -> Mod:
    offset = s.floats(s.H, learned=True)
    return lambda score, b, h, q, kv: score * offset[h]


@score
def documents_score(s: Setting) -> Mod:
    document = s.documents()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((q >= kv) & (document[q] == document[kv]), score, -INF)

    return mod


@score
def indexed_twice(s: Setting) -> Mod:
    bias = s.floats(s.B, s.S)
    return lambda score, b, h, q, kv: score + bias[b][q]


@score
def indexed_by_a_number(s: Setting) -> Mod:
    bias = s.floats(4, s.B, s.H, s.S)
    return lambda score, b, h, q, kv: score + bias[0][b, h][q]


@score
def indexed_by_a_tensor(s: Setting) -> Mod:
    bias, which = s.floats(s.B, s.H, 4, s.S), s.ints(2)
    return lambda score, b, h, q, kv: score + bias[b][h][which, q]


@score
def all_dimensions(s: Setting) -> Mod:
    heads, batches, tokens = s.floats(s.H), s.floats(s.B), s.floats(s.S)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = score + tokens[q]
        score = score + batches[b]
        return score + heads[h]

    return mod


@score
def halves_by_flag(s: Setting) -> Mod:
    flag = torch.arange(s.S, device=s.device) >= s.S // 2
    return lambda score, b, h, q, kv: torch.where(flag[q] == flag[kv], score, -INF)


@score
def bias_by_positions(s: Setting) -> Mod:
    bias = s.floats(s.S, s.S)
    return lambda score, b, h, q, kv: score + bias[q, kv]


@score
def bias_by_batch(s: Setting) -> Mod:
    bias = s.floats(s.B, s.S, s.S)
    return lambda score, b, h, q, kv: score + bias[b, q, kv]


@score
def bias_by_batch_and_head(s: Setting) -> Mod:
    bias = s.floats(s.B, s.H, s.S, s.S)
    return lambda score, b, h, q, kv: score + bias[b, h, q, kv]


@score
def relative_table(s: Setting) -> Mod:
    table, size = s.floats(2 * s.S), s.S
    return lambda score, b, h, q, kv: score + table[(q - kv) + size]


@score
def relative_table_from_the_end(s: Setting) -> Mod:
    """Negative indices count from the end."""
    table = s.floats(2 * s.S)
    return lambda score, b, h, q, kv: score + table[q - kv]


@score
def decomposed_position(s: Setting) -> Mod:
    width = 8
    rows = s.floats(s.B * s.H, s.S, s.S // width, 1).view(s.B, s.H, s.S, s.S // width, 1).squeeze(-1)
    return lambda score, b, h, q, kv: score + rows[b, h, q, kv // width]


@score
def bidirectional_prefix_of_each_sequence(s: Setting) -> Mod:
    count = s.ints([7 + 20 * b for b in range(s.B)])

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        both = (q <= count[b]) & (kv <= count[b])
        return torch.where(both | (q >= kv), score, -INF)

    return mod


@score
def scores_up_to_a_length(s: Setting) -> Mod:
    length = torch.arange(s.B, device=s.device, dtype=torch.int32) + 1

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = torch.where(q >= kv, score, -INF)
        return torch.where(kv <= length[b] + q, inner, -INF)

    return mod


@score
def scalar_tensor(s: Setting) -> Mod:
    scale = s.ints(1)
    return lambda score, b, h, q, kv: score + scale


@score
def scalar_tensor_as_factor(s: Setting) -> Mod:
    scale = torch.tensor(0.7, device=s.device)
    return lambda score, b, h, q, kv: score * scale


@score
def learned_temperature(s: Setting) -> Mod:
    temperature = s.floats(learned=True)
    return lambda score, b, h, q, kv: score * temperature


@score
def reduced_row(s: Setting) -> Mod:
    scale = s.floats(s.B, 8)
    return lambda score, b, h, q, kv: score + scale[b].sum(dim=-1)


@score
def distance_of_points(s: Setting) -> Mod:
    means, scales = s.floats(s.S, 3), s.floats(s.H).exp()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (means[q] - means[kv]).pow(2).sum(-1).sqrt()
        return torch.exp(-distance / scales[h]) * score

    return mod


@score(refused="a value of shape [256]")
def distance_of_long_points(s: Setting) -> Mod:
    means = s.floats(s.S, 256)
    return lambda score, b, h, q, kv: score * (means[q] - means[kv]).pow(2).sum(-1)


@score
def latent_rotary_part(s: Setting) -> Mod:
    query, key = s.floats(s.B, s.H, s.S, 8), s.floats(s.B, 1, s.S, 8)
    heads = s.H
    return lambda score, b, h, q, kv: score + 0.5 * torch.dot(query[b, h, q], key[b, h // heads, kv])


@score
def offsets_of_both(s: Setting) -> Mod:
    of_q, of_kv = s.floats(s.S).bfloat16(), s.floats(s.S).bfloat16()
    return lambda score, b, h, q, kv: score + of_q[q] + of_kv[kv]


@score
def doubles(s: Setting) -> Mod:
    bias = s.floats(s.H, dtype=torch.float64)
    return lambda score, b, h, q, kv: score + bias[h]


@score
def small_integers(s: Setting) -> Mod:
    bucket = (torch.arange(s.S, device=s.device) % 5).to(torch.uint8)
    bias = s.floats(5, learned=True)
    return lambda score, b, h, q, kv: score + bias[bucket[kv].long()]


# --- learned biases


@score
def learned_by_head(s: Setting) -> Mod:
    bias = s.floats(s.H, learned=True)
    return lambda score, b, h, q, kv: score + bias[h]


@score
def learned_by_distance(s: Setting) -> Mod:
    bias = s.floats(2 * s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[torch.abs(q - kv)]


@score
def learned_by_sum_of_positions(s: Setting) -> Mod:
    bias = s.floats(2 * s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[q + kv]


@score
def learned_by_positions(s: Setting) -> Mod:
    bias = s.floats(s.S, s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[q][kv]


@score
def learned_transposed(s: Setting) -> Mod:
    bias = s.floats(s.H, s.S, s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[h, kv, q]


@score
def learned_by_batch_and_head(s: Setting) -> Mod:
    bias = s.floats(s.B, s.H, s.S, s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[b, h, q, kv]


@score
def learned_factor(s: Setting) -> Mod:
    factor = s.floats(s.S, learned=True)
    return lambda score, b, h, q, kv: score * factor[q]


@score
def learned_window(s: Setting) -> Mod:
    bias, width = s.floats(17, learned=True), 8
    return lambda score, b, h, q, kv: score + bias[torch.clamp(q - kv + width, 0, 2 * width)]


@score
def learned_by_key(s: Setting) -> Mod:
    bias = s.floats(s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[kv]


@score
def learned_by_tensor_index(s: Setting) -> Mod:
    bias, which = s.floats(s.B, s.H, 4, s.S, learned=True), s.ints(0)
    return lambda score, b, h, q, kv: score + bias[b, h, which, q]


@score
def learned_through_a_table(s: Setting) -> Mod:
    bias = s.floats(s.S, learned=True)
    table = torch.arange(s.S, device=s.device).flip(0)
    return lambda score, b, h, q, kv: score + bias[table[q]]


@score
def learned_symmetric(s: Setting) -> Mod:
    bias = s.floats(s.S, learned=True)
    return lambda score, b, h, q, kv: score + bias[q] + bias[kv]


@score
def learned_from_the_end(s: Setting) -> Mod:
    bias, last = s.floats(s.S, s.S, learned=True), s.S - 1
    return lambda score, b, h, q, kv: score + bias[last - q, last - kv]


@score
def learned_gate_of_heads(s: Setting) -> Mod:
    gate = s.floats(s.H, learned=True)
    return lambda score, b, h, q, kv: score * torch.sigmoid(gate[h])


@score
def learned_biases_of_several_kinds(s: Setting) -> Mod:
    one, two = s.floats(s.S, learned=True), s.floats(s.H, s.S, learned=True)
    return lambda score, b, h, q, kv: score + one[q] * two[h, kv]


# --- masks of positions


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


@mask(refused="'&' of integers")
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


# --- masks that read tensors


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


def _both(name: str, score_case: str, mask_case: str) -> None:
    def make(s: Setting) -> tuple[Mod | None, Mod | None]:
        made = {case.name: case.make for case in CASES}
        return made[score_case](s)[0], made[mask_case](s)[1]

    CASES.append(Case(name, make))


_both("alibi_and_causal", "alibi", "causal_mask")
_both("softcap_and_window", "softcap", "sliding_window")
_both("squared_and_causal", "squared", "causal_mask")
_both("learned_bias_and_documents", "learned_by_distance", "causal_inside_documents")
