"""Transforms of torch.func inside of torch.compile, through the functions of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap

from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnc.flex import flex_attention
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

pytestmark = [  # of torch's transforms
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


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


@pytest.mark.one_in(6)
@pytest.mark.parametrize("door", [by_flash, by_varlen, by_flex])
@pytest.mark.parametrize("transform", ["each", "vjp", "grad"])
def test_they_give_what_they_give_outside(door: Callable[..., Any], transform: str) -> None:
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
def test_tensors_that_a_function_closes_over_are_no_part_of_a_transform(door: Callable[..., Any]) -> None:
    q, k, v, *_ = drawn()
    leaf, ones = q.clone().requires_grad_(), torch.ones(())
    expected = torch.autograd.grad(o := door(leaf, k, v).sum(), leaf)

    def weighed(s: torch.Tensor) -> Any:
        return (door(leaf, k, v) * s).sum()

    found = grad(weighed)(ones)
    torch.testing.assert_close(found, o)
    torch.testing.assert_close(torch.autograd.grad(found, leaf), expected)
    torch.testing.assert_close(jvp(weighed, (ones,), (ones,))[1], o)
    torch.testing.assert_close(vmap(weighed)(ones[None])[0], o)


def test_a_result_made_inside_of_a_transform_is_written() -> None:
    q, k, v, *_ = drawn()
    expected = by_flash(q, k, v)

    def weighed(s: torch.Tensor) -> Any:
        return (flash_attn_func(q, k, v, causal=True, out=torch.empty_like(q)) * s).sum()

    torch.testing.assert_close(grad(weighed)(torch.ones(())), expected.sum())


def test_gradients_that_are_off_around_a_transform_stay_off() -> None:
    """A transform turns them on for its own tensors alone."""
    q, k, v, *_ = drawn()
    leaf = q.clone().requires_grad_()

    def weighed(s: torch.Tensor) -> Any:
        o = by_flash(leaf, k, v)
        return (o * s).sum(), o

    with torch.no_grad():
        found, o = grad(weighed, has_aux=True)(torch.ones(()))
    assert not o.requires_grad
    torch.testing.assert_close(found, o.sum())
    assert grad(weighed, has_aux=True)(torch.ones(()))[1].requires_grad


@pytest.mark.one_in(2)
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
