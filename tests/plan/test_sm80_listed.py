"""Tiles that divide the blocks that a mask lists, and the warps that share them."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.model.schedule import TileConfig
from attnc.plan.ir.backward import Backward
from attnc.plan.lower import plan
from attnc.plan.sm80.listed import adapt, block_of, cuts_blocks
from tests.plan.planning import resolved
from tests.verify.judging import modules_of, spec

LISTS = ("idx: i32[B, H, R, S]",)


def config_of(mask: str, schedule: str = "") -> TileConfig:
    variant, chosen = resolved(mask, inputs=LISTS, target="cuda.sm_80", schedule=schedule)
    from attnc.plan.sm80.forward import cuda_configs

    return cuda_configs(variant, chosen)[0]


@pytest.mark.parametrize(
    ("rows", "keys", "schedule", "expected"),
    [
        (64, 64, "", (64, 64, 4)),
        (128, 48, "", (64, 48, 4)),
        (16, 16, "", (16, 16, 1)),
        (48, 80, "", (16, 16, 1)),
        (32, 128, "  tile.kv = 32", (32, 32, 2)),
        (64, 64, "  warps = 2", (64, 64, 2)),
    ],
)
def test_tiles_divide_blocks_and_warps_share_them(
    rows: int, keys: int, schedule: str, expected: tuple[int, int, int]
) -> None:
    found = config_of(f"listed(idx, rows = {rows}, keys = {keys})", schedule)
    assert (found.tile_q, found.tile_kv, found.warps) == expected


def test_a_tile_has_any_heads_of_one_query() -> None:
    packed = "  loops = [kv], pack = gqa, tile.q = 32"
    variant, schedule = resolved(
        "listed(idx, rows = 3, keys = 48)", inputs=LISTS, target="cuda.sm_80", schedule=packed
    )
    assert block_of(variant.attention, schedule) == (0, 48)
    assert block_of(variant.attention) == (3, 48)
    assert config_of("listed(idx, rows = 3, keys = 48)", packed).tile_q == 32


def test_nothing_is_adapted_without_lists() -> None:
    variant, _ = resolved("causal", target="cuda.sm_80")
    assert block_of(variant.attention) == (0, 0)
    config = config_of("causal")
    assert adapt(config, (0, 0), (), lambda _: "never fits") is config


def test_a_tile_that_crosses_blocks_says_so() -> None:
    config = config_of("listed(idx, rows = 64, keys = 64)")
    assert cuts_blocks(config, (64, 128)) == ""
    assert cuts_blocks(config, (96, 64)) == "tile.q = 64 does not divide the listed blocks of 96 queries"
    assert cuts_blocks(config, (0, 96)) == "tile.kv = 64 does not divide the listed blocks of 96 keys"


@pytest.mark.parametrize(("width", "keys"), [(64, 48), (128, 64), (256, 48), (256, 16)])
def test_gradients_have_tiles_of_blocks_whatever_warps_can_share(width: int, keys: int) -> None:
    lines = (
        f"input q: bf16[B, M, H, {width}]",
        f"input k, v: bf16[B, N, H, {width}]",
        "input idx: i32[B, H, R, S]",
        "score = dot(q, k)",
        f"mask = listed(idx, rows = 48, keys = {keys})",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {width}]",
        "grad q, k, v",
    )
    (module,) = modules_of(spec(lines, target="cuda.sm_80"))
    assert isinstance(module.backward, Backward)
    for kernel in module.backward.kernels:
        assert all(48 % x.tile_q == 0 and keys % x.tile_kv == 0 for x in kernel.configs)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("  warps = 4", "16 query rows for each of 4 warps: listed blocks have 48 queries"),
        ("  tile.q = 48, warps = 4", "16 query rows for each of 4 warps"),
        (
            "  loops = [kv], pack = gqa, warp_split = kv, warps = 4",
            "tile.kv = 16 is not a multiple of 64, 16 keys for each of 4 warps: listed blocks have 80 keys",
        ),
    ],
)
def test_a_tile_that_no_schedule_says_is_explained_by_its_block(schedule: str, reason: str) -> None:
    with pytest.raises(DiagnosticError) as refused:
        config_of("listed(idx, rows = 48, keys = 80)", schedule)
    assert refused.value.diagnostics[0].primary.text.endswith(reason)


def test_so_is_one_of_gradients() -> None:
    variant, schedule = resolved(
        "listed(idx, rows = 48, keys = 48)",
        inputs=LISTS,
        target="cuda.sm_80",
        schedule="  backward { warps = 4 }",
        grads="q, k, v",
    )
    with pytest.raises(DiagnosticError) as refused:
        plan(variant, schedule)
    reason = refused.value.diagnostics[0].primary.text
    assert reason.endswith("16 rows for each of 4 warps: listed blocks have 48 queries")
