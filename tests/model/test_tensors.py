"""Sizes of tensors as products: heads, and how many of them share a key."""

import pytest

from attnc.expr.nodes import show
from tests.model.resolving import attention_of


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "meaning"),
    [
        ("H", "H", ("H", "H", "1")),
        ("Hkv * G", "Hkv", ("Hkv * G", "Hkv", "G")),
        ("G * Hkv", "Hkv", ("G * Hkv", "Hkv", "G")),
        ("G", "1", ("G", "1", "G")),
        ("32", "8", ("32", "8", "4")),
        ("Hkv * 3", "Hkv", ("Hkv * 3", "Hkv", "3")),
    ],
)
def test_heads_dimensions_mean_the_same_in_every_spec(
    heads_q: str, heads_kv: str, meaning: tuple[str, str, str]
) -> None:
    attention = attention_of(
        f"""attention a {{
          input q: f16[B, M, {heads_q}, D]
          input k, v: f16[B, N, {heads_kv}, D]
          input a: f32[H, Hkv, G]
          score = dot(q, k) + a[h, 0, 0]
          normalize = softmax
          output o: f16[B, M, H, D]
        }}"""
    )
    assert tuple(show(size) for size in attention.tensor("a").shape) == meaning
    assert show(attention.group) == meaning[2]
