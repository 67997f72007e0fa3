"""What the spec of mods means, pair by pair, without a kernel: beside what torch computes of the mods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from attnc.expr.derive import derive
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import show
from attnc.flex.dense import _value
from attnc.flex.spec import CallLayout, write_spec
from attnc.flex.symbols import Scalar
from attnc.flex.trace import Trace, trace
from attnc.model.attention import Attention
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

Mod: TypeAlias = "Callable[..., Any] | None"


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of all pairs, and which are kept: [B, H, M, N], float64 and bool. One that is minus infinity is
    not kept.
    """

    score: torch.Tensor
    kept: torch.Tensor

    def __init__(self, score: torch.Tensor, kept: torch.Tensor) -> None:
        kept = (kept & ~score.isneginf()).expand_as(score)
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "score", torch.where(kept, score, 0.0))


def products(B: int, H: int, M: int, N: int) -> torch.Tensor:
    """Products of q and k of all kinds of sizes, zero and small ones among them."""
    generator = torch.Generator().manual_seed(B + 2 * H + 3 * M + 5 * N)
    found = torch.randn(B, H, M, N, generator=generator, dtype=torch.float64) * 2
    every = torch.rand(found.shape, generator=generator)
    return torch.where(every < 0.05, 0.0, torch.where(every > 0.95, found * 20, found))


def torch_scores(score_mod: Mod, mask_mod: Mod, product: torch.Tensor) -> Scores:
    """Returns what torch computes of mods, by its own way to call them for all pairs."""
    positions = [torch.arange(size) for size in product.shape]
    score, kept = product, torch.ones_like(product, dtype=torch.bool)
    with TransformGetItemToIndex():
        if score_mod is not None:
            score = _vmap_for_bhqkv(score_mod, prefix=(0,))(product, *positions).double()
        if mask_mod is not None:
            kept = _vmap_for_bhqkv(mask_mod, prefix=())(*positions)
    return Scores(score.expand_as(product).detach(), kept)


def torch_slopes(score_mod: Callable[..., Any], product: torch.Tensor) -> torch.Tensor:
    """Returns torch's derivatives of scores by products."""
    product = product.clone().requires_grad_()
    with TransformGetItemToIndex():
        score = _vmap_for_bhqkv(score_mod, prefix=(0,))(
            product, *(torch.arange(size) for size in product.shape)
        )
    return torch.autograd.grad(score.sum(), product)[0]


def spec_scores(
    score_mod: Mod, mask_mod: Mod, product: torch.Tensor, numbers: Mapping[int, float] | None = None
) -> Scores:
    """Returns what the spec of the same mods means. numbers: of the tape's, those that are arguments, with
    their values.
    """
    attention, environment = _read(score_mod, mask_mod, product, numbers or {})
    score, kept = (torch.as_tensor(evaluate(x, environment)) for x in (attention.score, attention.mask))
    return Scores(score.expand_as(product), kept.expand_as(product))


def spec_slopes(score_mod: Mod, product: torch.Tensor) -> torch.Tensor:
    """Returns the derivatives of the spec's scores by products."""
    attention, environment = _read(score_mod, None, product, {}, gradients=True)
    return torch.as_tensor(evaluate(derive(attention.score).dot, environment)).expand_as(product)


def _read(
    score_mod: Mod,
    mask_mod: Mod,
    product: torch.Tensor,
    numbers: Mapping[int, float],
    *,
    gradients: bool = False,
) -> tuple[Attention, Env]:
    sizes = dict(zip("BHMN", product.shape, strict=True))
    cpu = torch.device("cpu")
    traced = trace(score_mod, mask_mod, scale=1.0, sizes=sizes, device=cpu, gradients=gradients)
    layout = CallLayout(
        dtype="f32", head_dim=16, value_dim=16, scaled=True, grouped=False, lse=False, differentiable=False
    )
    spec = write_spec(traced, layout, name="mods", numbers=numbers, scheduled=False)
    (attention,) = resolve(parse(Source("mods.attn", spec.text)), prelude()).attentions
    captured = [_as_read(traced.tape.captures[at].tensor) for at in spec.captures]
    passed = [torch.tensor(numbers[slot]) for slot in spec.numbers]
    tensors = dict(zip((x.name for x in attention.inputs[3:]), (*captured, *passed), strict=True))
    dims = dict(sizes)
    for x in attention.inputs[3:]:
        dims |= zip(map(show, x.shape), tensors[x.name].shape, strict=True)
    indices = np.meshgrid(*(np.arange(size) for size in product.shape), indexing="ij", sparse=True)
    environment = Env(
        indices=dict(zip(("b", "h", "q_idx", "kv_idx"), indices, strict=True)),
        dims=dims,
        tensors={name: x.numpy() for name, x in tensors.items()},
        dot=product.numpy(),
    )
    return attention, environment


def check_meaning(score_mod: Mod, mask_mod: Mod, product: torch.Tensor) -> None:
    """Compares both: within roundings of float32, in which torch computes what has no score in it."""
    found, expected = spec_scores(score_mod, mask_mod, product), torch_scores(score_mod, mask_mod, product)
    assert torch.equal(found.kept, expected.kept)
    torch.testing.assert_close(found.score, expected.score, rtol=2e-5, atol=2e-5, equal_nan=True)


def check_tape(score_mod: Mod, mask_mod: Mod, product: torch.Tensor, *, has_rows: bool = False) -> None:
    """Compares what the tape of a mod computes with torch, without a spec; and each value on the way with the
    bounds that are claimed of it. has_rows: whether the mod takes rows of tensors.
    """
    claims = set[tuple[int, float, float]]()
    make = Scalar.__init__

    def noting(self: Scalar, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        claims.add((self.at, self.low, self.high))

    with patch.object(Scalar, "__init__", noting):
        traced = trace_at(score_mod, mask_mod, product)
    found = tape_values(traced, product)
    for at, low, high in claims:  # of numbers, which NaN is not
        assert low == -np.inf or not (found[at] < low).any(), (traced.tape.show(at), low)
        assert high == np.inf or not (found[at] > high).any(), (traced.tape.show(at), high)
    kept = found[traced.mask].expand_as(product)
    scores = Scores(found[traced.score].expand_as(product), kept)
    expected = (torch_scores if has_rows else _scores_at_once)(score_mod, mask_mod, product)
    assert torch.equal(scores.kept, expected.kept)
    torch.testing.assert_close(
        scores.score.double(), expected.score.double(), rtol=2e-5, atol=2e-5, equal_nan=True
    )


def trace_at(score_mod: Mod, mask_mod: Mod, product: torch.Tensor) -> Trace:
    """Returns the tape of mods at the sizes of these products."""
    sizes = dict(zip("BHMN", product.shape, strict=True))
    return trace(score_mod, mask_mod, scale=1.0, sizes=sizes, device=torch.device("cpu"))


def tape_values(traced: Trace, product: torch.Tensor) -> dict[int, torch.Tensor]:
    """Returns the entries of a tape for all pairs, in shapes that broadcast to that of the products."""
    indices = dict(zip(("b", "h", "q_idx", "kv_idx"), _positions(product), strict=True))
    found: dict[int, torch.Tensor] = {}
    for at in range(len(traced.tape.entries)):
        found[at] = _value(traced.tape, at, found, indices, product.float())
    return found


def _positions(product: torch.Tensor) -> list[torch.Tensor]:
    axes = range(product.dim())
    return [
        torch.arange(size).view([-1 if axis == at else 1 for axis in axes])
        for at, size in enumerate(product.shape)
    ]


def _scores_at_once(score_mod: Mod, mask_mod: Mod, product: torch.Tensor) -> Scores:
    """Returns what torch computes of mods that are given all pairs together, which is quicker; one by one
    where a mod reshapes what it is given.
    """
    score, kept = product, torch.ones_like(product, dtype=torch.bool)
    try:
        if score_mod is not None:
            score = score_mod(product, *_positions(product)).double()
        if mask_mod is not None:
            kept = mask_mod(*_positions(product))
        return Scores(score.expand_as(product).detach(), kept.expand_as(product))
    except RuntimeError:
        return torch_scores(score_mod, mask_mod, product)


def _as_read(captured: torch.Tensor) -> torch.Tensor:
    """Returns a captured tensor of a type that NumPy has."""
    captured = captured.detach()
    return captured.float() if captured.dtype is torch.bfloat16 else captured
