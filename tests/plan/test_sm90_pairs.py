"""Which loads come as tiles of queries and keys, and what room they find."""

from __future__ import annotations

import pytest

from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.plan.sm90.layout import Sm90Layout
from attnc.plan.sm90.target import layout_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

SPEC = """attention a {{
  input q: bf16[B, M, H, {d}]
  input k, v: bf16[B, N, H, {d}]
  input bias: {bias}
  input ids: i32[H]
  score = dot(q, k) / 8 + {load}
  mask = {mask}
  normalize = softmax
  output o: bf16[B, M, H, {d}]
}}
schedule a for cuda.sm_90a {{
  softmax = online(maximum = lazy(20)){tiles}
}}
"""


def planned(
    load: str = "bias[h, q_idx, kv_idx]",
    bias: str = "bf16[H, M, N]",
    *,
    d: int = 128,
    mask: str = "causal",
    tiles: str = "",
) -> Sm90Layout:
    text = SPEC.format(load=load, bias=bias, d=d, mask=mask, tiles=tiles)
    (module,) = plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules
    kernel = module.kernel
    layout = layout_of(kernel)
    config = kernel.configs[0]
    assert ("pairs" in layout.shared_memory(config)) == (layout.pair_stages > 0)
    assert layout.barriers(config).get("pairs", 0) == 2 * layout.pair_stages
    return layout


@pytest.mark.parametrize(
    ("load", "bias"),
    [
        ("bias[h, q_idx, kv_idx]", "bf16[H, M, N]"),
        ("bias[q_idx, kv_idx]", "f16[M, N]"),
        ("bias[b, h, q_idx, kv_idx]", "bf16[B, H, M, N]"),
        ("bias[h // 2, q_idx, kv_idx]", "bf16[R, M, N]"),
        ("2 * bias[0, q_idx, kv_idx]", "bf16[1, M, N]"),
    ],
)
def test_a_tile_of_the_last_two_axes_is_a_box(load: str, bias: str) -> None:
    layout = planned(load, bias)
    assert (layout.pair, layout.pair_stages) == (2, 2)


@pytest.mark.parametrize(
    ("load", "bias"),
    [
        ("bias[h, kv_idx, q_idx]", "bf16[H, N, M]"),  # columns are queries
        ("bias[h, q_pos, kv_idx]", "bf16[H, N, N]"),  # of other rows where M is not N
        ("bias[h, q_idx - kv_idx + N]", "bf16[H, R]"),
        ("bias[ids[h], q_idx, kv_idx]", "bf16[R, M, N]"),  # who copies would have to load
        ("bias[b, h, 0, q_idx, kv_idx]", "bf16[B, H, 1, M, N]"),  # more axes than a box has
    ],
)
def test_other_loads_are_made_where_they_are_used(load: str, bias: str) -> None:
    assert planned(load, bias).pair_stages == 0


def test_what_a_mask_reads_too_is_loaded_there() -> None:
    assert planned(mask="causal and bias[h, q_idx, kv_idx] > 0").pair_stages == 0


@pytest.mark.parametrize(
    ("bias", "d", "tiles", "stages"),
    [
        ("bf16[H, M, N]", 128, "", 2),
        ("f32[H, M, N]", 128, "", 2),
        ("f32[H, M, N]", 128, ", tile.kv = 128", 1),  # 64 KB a tile
        ("f32[H, M, N]", 128, ", tile.kv = 64", 2),
        ("bf16[H, M, N]", 256, "", 0),  # K and V leave no room
    ],
)
def test_there_are_as_many_tiles_as_there_is_room_for(bias: str, d: int, tiles: str, stages: int) -> None:
    assert planned(bias=bias, d=d, tiles=tiles).pair_stages == stages


@pytest.mark.parametrize(
    ("bias", "d", "tiles"),
    [("f32[H, M, N]", 128, (192, 64)), ("f32[H, M, N]", 64, (128, 128)), ("bf16[H, M, N]", 128, (128, 128))],
)
def test_values_of_32_bits_get_tiles_of_which_two_have_room(
    bias: str, d: int, tiles: tuple[int, int]
) -> None:
    text = SPEC.format(load="bias[h, q_idx, kv_idx]", bias=bias, d=d, mask="causal", tiles="")
    (module,) = plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules
    config = module.kernel.configs[0]
    assert (config.tile_q, config.tile_kv) == tiles
