"""Scores of positions."""

from __future__ import annotations

from typing import Any

import torch

from tests.flex.cases import INF, Mod, Setting, refused, score


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
        distance = torch.abs(q - kv).clamp(max=9)
        return score / torch.sqrt(1.0 + distance) - torch.log2(2.0 + distance) + torch.exp(-distance / 4)

    return mod


@score
def batch_size_in_closure(s: Setting) -> Mod:
    batch = s.B
    return lambda score, b, h, q, kv: score + batch


@score
def trigonometric(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.sin(score) + torch.cos(score)


@score
def trigonometric_product(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.cos(score) * torch.sin(score)


@score
def tangent(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: score + torch.tan(0.1 * (b + 1))


@score
def padded_by_score(s: Setting) -> Mod:
    limit = s.ints([1, 2])
    return lambda score, b, h, q, kv: torch.where(score <= limit[b], torch.where(q >= kv, score, -INF), -INF)


@refused("'atan'")
def arctangent(s: Setting) -> Mod:
    return lambda score, b, h, q, kv: torch.atan(score)


@refused("a torch.autograd.Function")
def autograd_function(s: Setting) -> Mod:
    class Masked(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(a: Any, keep: Any) -> Any:
            return torch.where(keep, a, -INF)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(inputs[1])

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, None

    apply: Mod = Masked.apply
    return lambda score, b, h, q, kv: apply(score, q <= kv)
