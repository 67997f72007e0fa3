"""What docs/recipes.md says of specs: each is its paper's attention, written out in PyTorch, with the
gradients of what is learned before the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import attnc

SPECS = Path(__file__).parents[2] / "specs"
B, N, H, D = 2, 70, 2, 64


def compiled(name: str) -> Callable[..., Any]:
    return attnc.compile(SPECS / f"{name}.attn", target="triton")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def qkv(
    rows: int = N, heads: int = H, columns: int = D, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    return [draw(B, rows, heads, columns, dtype=dtype) for _ in range(3)]


def eager(
    qkv: Sequence[torch.Tensor], scale: float, bias: torch.Tensor | float = 0.0, *, causal: bool = True
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v in float64; tensors [B, N, H, D], a bias [B, H, M, N] or less."""
    q, k, v = qkv
    scores = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())


def agree(
    ours: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor], others: list[torch.Tensor]
) -> None:
    """Both results, and gradients of the same sum of them, by leaves that hold the same numbers."""
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=0.02)
    weights = torch.randn_like(theirs)
    found = torch.autograd.grad((ours.double() * weights).sum(), leaves)
    expected = torch.autograd.grad((theirs * weights).sum(), others)
    for mine, their in zip(found, expected, strict=True):
        size = float(their.abs().max())
        torch.testing.assert_close(mine.double(), their.double(), rtol=0, atol=0.03 * size)


def leaves_of(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two copies, both of which ask for gradients; the second in float64."""
    return [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_forgetting_gates_are_learned_through_their_sums() -> None:
    logits = 1 + draw(B, H, N, dtype=torch.float32)
    ours, theirs = leaves_of(*qkv(), logits)
    c = functional.logsigmoid(ours[3]).cumsum(-1)
    o, _ = compiled("forgetting")(*ours[:3], c)
    between = functional.logsigmoid(theirs[3]).cumsum(-1)
    expected = eager(theirs[:3], D**-0.5, between[..., :, None] - between[..., None, :])
    agree(o, expected, ours, theirs)


def t5_bucket(distance: torch.Tensor, buckets: int = 32, largest: int = 128) -> torch.Tensor:
    """The bidirectional buckets of T5, by key minus query: half for each sign, half of these exact."""
    half, exact = buckets // 2, buckets // 4
    size = distance.abs()
    beyond = (
        exact + (torch.log(size.clamp(min=1) / exact) / math.log(largest / exact) * (half - exact)).long()
    )
    return (distance > 0) * half + torch.where(size < exact, size, beyond.clamp(max=half - 1))


def test_t5_has_a_bias_for_each_bucket() -> None:
    ours, theirs = leaves_of(*qkv(200)[:3], draw(32, H, dtype=torch.float32))
    bucket = t5_bucket(torch.arange(-128, 129)).int()
    lengths = torch.full((B,), 200, dtype=torch.int32)
    with torch.no_grad():
        for q in (ours[0], theirs[0]):
            q *= 0.125
    o = compiled("t5_bias")(*ours[:3], bucket, ours[3], lengths)
    places = torch.arange(200)
    bias = theirs[3][t5_bucket(places[None, :] - places[:, None])].permute(2, 0, 1)
    agree(o, eager(theirs[:3], 1.0, bias, causal=False), ours, theirs)


def test_swin_has_a_bias_for_each_offset_and_regions() -> None:
    w = 7
    q, k, v = (draw(B, w * w, H, 32, dtype=torch.float16) for _ in range(3))
    ours, theirs = leaves_of(q, k, v, draw((2 * w - 1) ** 2, H, dtype=torch.float32))
    region = torch.randint(0, 3, (B, w * w), dtype=torch.int32)
    o = compiled("swin")(*ours, region)
    place = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
    offset = place[:, :, None] - place[:, None, :] + w - 1
    bias = theirs[3][offset[0] * (2 * w - 1) + offset[1]].permute(2, 0, 1)
    apart = (region[:, :, None] != region[:, None, :])[:, None]
    bias = bias.expand(B, H, w * w, w * w).masked_fill(apart, -math.inf)
    agree(o, eager(theirs[:3], 32**-0.5, bias, causal=False), ours, theirs)


def test_inkling_has_a_bias_of_each_query_for_its_last_keys() -> None:
    reach = 24
    ours, theirs = leaves_of(*qkv(columns=128), draw(B, N, H, reach))
    o = compiled("inkling")(*ours)
    distance = torch.arange(N)[:, None] - torch.arange(N)[None, :]
    near = (distance >= 0) & (distance < reach)
    rows = theirs[3].permute(0, 2, 1, 3)
    bias = rows.gather(-1, distance.clamp(0, reach - 1).expand(B, H, N, N)).masked_fill(~near, 0.0)
    agree(o, eager(theirs[:3], 128**-0.5, bias), ours, theirs)


def test_cosines_have_a_temperature_for_each_head() -> None:
    ours, theirs = leaves_of(*qkv(), draw(H, dtype=torch.float32) + 2)
    q, k, v, temperature = ours
    inverse = [torch.rsqrt(x.float().square().sum(-1) + 1e-12) for x in (q, k)]
    o = compiled("qk_norm")(q, k, v, *inverse, temperature)
    unit = [functional.normalize(x, dim=-1) for x in theirs[:2]]
    scale = theirs[3].exp().clamp(max=100)[None, :, None, None]
    scores = torch.einsum("bihd,bjhd->bhij", *unit) * scale
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), theirs[2])
    agree(o, expected, ours, theirs)


def test_slopes_may_belong_to_tokens() -> None:
    ours, theirs = leaves_of(*qkv(), draw(B, N, H, dtype=torch.float32) * 0.1)
    o = compiled("position_slopes")(*ours)
    distance = torch.arange(N)[:, None] - torch.arange(N)[None, :]
    bias = -theirs[3].permute(0, 2, 1)[..., None] * distance
    agree(o, eager(theirs[:3], D**-0.5, bias), ours, theirs)


def test_two_maps_of_one_call_differ() -> None:
    q, (k, v) = draw(B, N, 4, 128), qkv(heads=2, columns=128)[:2]
    ours, theirs = leaves_of(q, k, v, draw(B, N, 2))
    o = compiled("differential")(*ours).unflatten(2, (-1, 2)).sum(3)
    first, second = (eager((theirs[0][:, :, at::2], theirs[1], theirs[2]), 128**-0.5) for at in (0, 1))
    agree(o, first - theirs[3].sigmoid()[..., None] * second, ours, theirs)
