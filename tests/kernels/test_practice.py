"""What attentions of papers and engines mean, against NumPy written by hand; at night their kernels too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnc.model.attention import Attention
from attnc.reference import reference
from attnc.verify.case import Case
from attnc.verify.problem import build
from tests.kernels.practice import PRACTICE, Array, Practice, Scores
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import modules_of, right_by_day, subject_of_text
from tests.verify.random_specs import HOPPER

SIZES = ({"B": 2, "M": 9, "N": 9}, {"B": 1, "M": 5, "N": 37}, {"B": 2, "M": 12, "N": 7})
#: Of sizes that only some have.
OTHERS = {"H": 4, "Hkv": 2, "G": 3, "X": 6, "Y": 5, "W": 2}


def by_hand(practice: Practice, attention: Attention, inputs: dict[str, Array]) -> Array:
    """o [B, M, H, Dv] in float64: rows that see no key are 0."""
    q, k, v = (inputs[name].astype(np.float64) for name in ("q", "k", "v"))
    (batch, m, heads, d), n = q.shape, k.shape[1]
    group = heads // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    b, h, i, j = np.ogrid[:batch, :heads, :m, :n]
    s = np.einsum("bmhd,bnhd->bhmn", q, k) / np.sqrt(d)
    given = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
    score, keep = practice.rule(Scores(b, h, i, j, s, M=m, N=n, H=heads, G=group, inputs=given))
    score = np.where(np.broadcast_to(keep, s.shape), score, -np.inf)
    sink = np.full(heads, -np.inf)
    if practice.sink:
        sink = np.zeros(heads) if practice.sink == "0" else given["sink"].astype(np.float64)
    top = np.maximum(score.max(-1, initial=-np.inf), sink[None, :, None])
    top = np.where(np.isfinite(top), top, 0)[..., None]
    weights = np.exp(score - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink[None, :, None, None] - top)
    weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
    return np.einsum("bhmn,bnhd->bmhd", weights, v)


def as_tensor(x: object) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", PRACTICE)
def test_it_means_what_it_says(name: str) -> None:
    practice = PRACTICE[name]
    (module,) = modules_of(practice.text(small_tiles("triton"), "triton"))
    attention = module.variant.attention
    for seed, sizes in enumerate(SIZES):
        dims = {**OTHERS, **sizes}
        problem = build(attention, Case(dims=dims, seed=2 * seed))
        inputs = {
            tensor.name: (x.float() if x.dtype == torch.bfloat16 else x).numpy()
            for tensor in attention.inputs
            if isinstance(x := problem.inputs[tensor.name], torch.Tensor)
        }
        inputs |= {made: draw(dims) for made, draw in practice.draws.items()}
        tensors = {made: torch.from_numpy(np.array(x)) for made, x in inputs.items()}
        for given in ("q", "k", "v"):
            tensors[given] = as_tensor(problem.inputs[given])
        found = reference(attention, tensors)["o"]
        np.testing.assert_allclose(found, by_hand(practice, attention, inputs), rtol=1e-9, atol=1e-12)


def test_a_mask_that_is_off_by_one_is_seen() -> None:
    practice, wider = PRACTICE["gpt-oss"], replace(PRACTICE["gpt-oss"], mask="window(12, 0)")
    (module,) = modules_of(wider.text(small_tiles("triton"), "triton"))
    problem = build(module.variant.attention, Case(dims={**OTHERS, **SIZES[1]}))
    inputs = {name: x.float().numpy() for name, x in problem.inputs.items() if isinstance(x, torch.Tensor)}
    found = reference(module.variant.attention, problem.inputs)["o"]
    assert not np.allclose(found, by_hand(practice, module.variant.attention, inputs))


@pytest.mark.nightly
@pytest.mark.parametrize("target", [*EACH, HOPPER])
@pytest.mark.parametrize("name", PRACTICE)
def test_its_kernels_are_right(name: str, target: str) -> None:
    skip_without_compiler(target)
    schedule = "consumers = 2, tile.kv = 32" if target == HOPPER else small_tiles(target)
    right_by_day(subject_of_text(PRACTICE[name].text(schedule, target)))
