"""Which kernels take rows of do and q as one operand, and by which columns."""

from __future__ import annotations

import pytest

from attnc.plan.joined import joined_parts, joins_rows
from tests.verify.judging import modules_of

LATENT = """attention latent {{
  input q: bf16[B, M, G, {width}]
  input k: bf16[B, N, 1, {width}]
  input v: bf16[B, N, 1, {values}] via prefix(k)
  input selected: i32[B, M, S] is distinct
  score = dot(q, k) / sqrt(192)
  mask = {mask}
  normalize = softmax
  output o: {out}[B, M, G, {values}]
  grad q, k
}}
schedule latent for triton {{ loops = [kv], pack = gqa }}
"""
LISTED = "listed(selected, rows = 1, keys = 1)"


def latent(width: int = 576, values: int = 512, out: str = "bf16", mask: str = LISTED) -> str:
    return LATENT.format(width=width, values=values, out=out, mask=mask)


@pytest.mark.parametrize(("width", "values"), [(576, 512), (192, 128), (320, 256), (160, 128)])
def test_parts_cover_every_column_once_and_end_where_values_end(width: int, values: int) -> None:
    """A product takes columns of values, which do and q both have, or those of q alone."""
    (module,) = modules_of(latent(width, values))
    parts = joined_parts(module.variant.attention)
    assert [part.first for part in parts] == [0, *(part.first + part.width for part in parts[:-1])]
    assert parts[-1].first + parts[-1].width == width
    assert values in {part.first for part in parts}
    assert all(part.width <= 128 for part in parts)


def test_rows_are_joined_where_queries_select_keys_of_latents() -> None:
    (module,) = modules_of(latent())
    assert joins_rows(module.variant.attention)


@pytest.mark.parametrize("text", [latent(mask="causal"), latent(out="f32")])
def test_rows_stay_apart_elsewhere(text: str) -> None:
    """Over all keys each tile is read once for many rows; outputs of another type are no operand."""
    (module,) = modules_of(text)
    assert not joins_rows(module.variant.attention)
