"""`to_spec`: what examples of tensors say is what the same sizes say by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.flex import to_spec
from attnc.flex.spec import DTYPES

AXES = {"B": torch.zeros(2), "H": torch.zeros(6), "M": torch.zeros(5), "N": torch.zeros(7)}


def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + AXES["B"][b] + AXES["H"][h] + AXES["M"][q] + AXES["N"][kv]


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("value_dim", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_say_what_sizes_say(dtype: torch.dtype, value_dim: int, kv_heads: int) -> None:
    q = torch.zeros(2, 6, 5, 16, dtype=dtype)
    k, v = (torch.zeros(2, kv_heads, 7, size, dtype=dtype) for size in (16, value_dim))
    text = to_spec(biased, query=q, key=k, value=v)
    named = to_spec(biased, dtype=dtype, head_dim=16, enable_gqa=kv_heads != 6, B=2, H=6, M=5, N=7)
    assert value_dim != 16 or text == named
    for line in ("B]", "H]", "M]", "N]"):
        assert f": f32[{line}" in text
    heads = "Hkv * G" if kv_heads != 6 else "H"
    assert f"q: {DTYPES[dtype]}[B, {heads}, M, 16]" in text
    assert f"{DTYPES[dtype]}[B, {heads.split(' ')[0]}, N, {value_dim}]" in text


def test_axes_of_other_sizes_are_their_own() -> None:
    text = to_spec(biased, B=3, H=6, M=4, N=7)
    assert ": f32[B]" not in text
    assert ": f32[M]" not in text
    assert ": f32[H]" in text
    assert ": f32[N]" in text


def test_without_sizes_axes_are_named_by_their_indices() -> None:
    text = to_spec(biased)
    assert all(f": f32[{axis}]" in text for axis in AXES)
