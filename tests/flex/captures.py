"""Scores that read tensors, learned ones among them."""

from __future__ import annotations

from typing import Any

import torch

from tests.flex.cases import INF, Mod, Setting, refused, score


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
    temperature = s.floats(1, learned=True)
    return lambda score, b, h, q, kv: score * temperature[b * 0]


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


@refused("a value of shape [256]")
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
    return lambda score, b, h, q, kv: score + bias[q, kv]


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
