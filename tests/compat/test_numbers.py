"""Numbers of NumPy's and 0-d tensors as arguments, which torch.compile traces as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnc
from attnc.compat.flash_attn import flash_attn_func
from attnc.flex import flex_attention
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

SPEC = """
attention numbered {
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  input scale: f32[]
  input left: i32[]
  score = dot(q, k) * scale
  mask = window(left, 0)
  normalize = softmax
  output o: f32[B, M, H, 16]
}
"""


def of_flash(q: torch.Tensor, number: Any) -> Any:
    return flash_attn_func(q, q, q, softmax_scale=number)


def of_flash_with_a_cap(q: torch.Tensor, number: Any) -> Any:
    return flash_attn_func(q, q, q, softmax_scale=number, softcap=3.0)


def of_flex(q: torch.Tensor, number: Any) -> Any:
    return flex_attention(q, q, q, scale=number)


def of_a_mod(q: torch.Tensor, number: Any) -> Any:
    return flex_attention(
        q,
        q,
        q,
        lambda score, b, h, i, j: torch.where(i > j, score * number, score + number),
        scale=number,
        mask_mod=lambda b, h, i, j: i * number >= j,
    )


FAMILY = attnc.compile(SPEC, target="triton")


def of_a_spec(q: torch.Tensor, number: Any) -> Any:
    return FAMILY(q, q, q, number, np.int64(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.int64(2), torch.tensor(0.5)], ids=repr
)
@pytest.mark.parametrize("function", [of_flash, of_flash_with_a_cap, of_flex, of_a_mod, of_a_spec])
def test_numbers_are_traced(function: Callable[..., Any], number: Any) -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = function(q, number)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q, number)
    torch.testing.assert_close(found, expected)
    changed = torch.as_tensor(number) * 2 if isinstance(number, torch.Tensor) else type(number)(number * 2)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q, changed)
    torch.testing.assert_close(found, function(q, changed))
