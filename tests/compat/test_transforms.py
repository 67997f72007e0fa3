"""Transforms of torch.func inside of torch.compile, through the functions of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, vjp, vmap

from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnc.flex import flex_attention
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's transforms


def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attn_func(q, k, v, causal=True)


def by_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    ends, most = torch.tensor([0, q.shape[1]], dtype=torch.int32), q.shape[1]
    found = flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, most, most, causal=True)
    return found[None]


def by_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Not in the graph, which has no transforms of a mod's tensors."""
    return flex_attention(q, k, v, lambda score, b, h, i, j: score - (i - j).abs())


def drawn() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(3, 1, 6, 2, 16)) + tuple(torch.randn(2, 1, 6, 2, 16))


@pytest.mark.parametrize("door", [by_flash, by_varlen, by_flex])
@pytest.mark.parametrize("transform", ["grad", "each", "vjp"])
def test_they_give_what_they_give_outside(door: Callable[..., Any], transform: str) -> None:
    if door is by_flex and transform == "vjp":
        pytest.skip("what vjp returns is differentiated outside of the graph, by torch alone")
    qs, (k, v) = torch.stack(drawn()[:3]), drawn()[3:]

    def loss(q: torch.Tensor) -> Any:
        return door(q, k, v).square().sum()

    def transformed() -> Any:
        if transform == "grad":
            return grad(loss)(qs[0])
        if transform == "each":
            return vmap(grad(loss))(qs)
        return vjp(lambda q: door(q, k, v), qs[0])[1](k)[0]

    expected = transformed()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(transformed, backend="aot_eager")(), expected)


@pytest.mark.parametrize("door", [by_flash, by_flex])
def test_second_derivatives_are_refused_by_name(door: Callable[..., Any]) -> None:
    q, _, _, k, v = drawn()

    def bent() -> Any:
        return hessian(lambda s: door(q * s, k, v).square().sum())(torch.ones(()))

    torch.compiler.reset()
    for call in (bent, torch.compile(bent, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            call()


def test_numbers_that_a_transform_meets_first_are_no_part_of_it() -> None:
    q, k, v = drawn()[2:]

    def loss(q: torch.Tensor) -> Any:
        return flash_attn_func(q, k, v, softmax_scale=0.8125, softcap=2.4375).square().sum()

    found = grad(loss)(q)
    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found, leaf.grad)
    torch.testing.assert_close(vmap(loss)(q[None]), loss(q)[None])
