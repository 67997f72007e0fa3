"""Numbers of NumPy's and 0-d tensors as arguments, which torch.compile traces as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported

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
@pytest.mark.one_in(4)
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


# --- numbers that flash-attention's functions choose kernels by ---------------------------------------------


def of_a_softcap(q: torch.Tensor, number: Any) -> Any:
    return flash_attn_func(q, q, q, softcap=number)


def of_a_window(q: torch.Tensor, number: Any) -> Any:
    return flash_attn_func(q, q, q, window_size=(number, -number))


def of_a_list(q: torch.Tensor, number: Any) -> Any:
    window: Any = [number, number]
    return flash_attn_func(q, q, q, causal=True, window_size=window)


def of_an_array(q: torch.Tensor, number: Any) -> Any:
    window: Any = np.array([2, 1]) * number
    return flash_attn_func(q, q, q, window_size=window)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("function", [of_a_softcap, of_a_window, of_a_list, of_an_array])
@pytest.mark.parametrize("number", [np.int32(2), np.int64(2), torch.tensor(2)], ids=repr)
def test_numbers_that_choose_kernels_are_traced(function: Callable[..., Any], number: Any) -> None:
    if function is of_an_array and isinstance(number, torch.Tensor):
        number = int(number)
    torch.compiler.reset()
    q = torch.randn(1, 6, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = function(q, number)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q, number)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(x.square().sum(), q)[0] for x in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=repr)
def test_dropout_is_traced(number: Any) -> None:
    torch.compiler.reset()
    q, v = torch.randn(1, 64, 2, 16), torch.ones(1, 64, 2, 16)
    compiled = torch.compile(lambda q, v, p: flash_attn_func(q, q, v, p), fullgraph=True, backend="eager")
    assert 0.5 < compiled(q, v, number).mean() < 1.5
    assert compiled(q, v, number).std() > 0.1


def test_what_is_no_softcap_is_found_when_the_graph_runs() -> None:
    torch.compiler.reset()
    compiled = torch.compile(of_a_softcap, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 6, 2, 16)
    torch.testing.assert_close(compiled(q, np.float32(2)), of_a_softcap(q, 2.0))
    with pytest.raises(RuntimeError, match="flash_attn_func: softcap: expected more than 0"):
        compiled(q, np.float32(0))


@pytest.mark.parametrize("name", ["causal", "deterministic"])
def test_flags_without_a_value_are_refused_by_name(name: str) -> None:
    torch.compiler.reset()
    q = torch.randn(1, 6, 2, 16)

    def call(flag: Any) -> Any:
        options: Any = {name: flag}
        return flash_attn_func(q, q, q, **options)

    compiled = torch.compile(call, fullgraph=True)
    with pytest.raises(Unsupported, match=rf"{name}: expected a number of Python's .* give bool\({name}\)"):
        compiled(np.bool_(True))
    assert torch.equal(compiled(True), call(True))
