"""Decode kernels on Hopper whose warps have keys of their own: what a block holds, and what is refused."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.model.schedule import TileConfig
from attnc.plan.ir import Decode, Module
from attnc.plan.sm90 import SM90A, decode_layout_of
from attnc.plan.sm90.warps import BLOCK_SHARE, BLOCKS, Sm90WarpsLayout, warps_registers
from tests.verify.judging import modules_of, spec

OWN = "warp_split = kv"


def planned(knobs: str = OWN, *, k: str = "e4m3", v: str = "e4m3", d: int = 128, dv: int = 0) -> Module:
    (module,) = modules_of(text(knobs, k=k, v=v, d=d, dv=dv))
    return module


def text(
    knobs: str = OWN, *, k: str = "e4m3", v: str = "e4m3", d: int = 128, dv: int = 0, prefix: bool = False
) -> str:
    lines = [
        f"input q: bf16[B, M, Hkv * G, {d}]",
        f"input k: {k}[B, N, Hkv, {d}]",
        f"input v: {v}[B, N, Hkv, {dv or d}]{' via prefix(k)' if prefix else ''}",
        "score = dot(q, k)",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * G, {dv or d}]",
    ]
    return spec(lines, f"loops = [kv], pack = gqa, split.kv = auto, {knobs}", target="cuda.sm_90a")


def layout_of(module: Module) -> tuple[Sm90WarpsLayout, TileConfig]:
    layout = decode_layout_of(module.kernel)
    assert isinstance(layout, Sm90WarpsLayout)
    return layout, module.kernel.configs[0]


def test_three_blocks_live_on_a_multiprocessor() -> None:
    module = planned(f"{OWN}, stages = 2")
    layout, config = layout_of(module)
    assert (config.tile_q, config.tile_kv, config.warps) == (16, 128, 4)
    assert layout.shared_memory(config) == {"tiles": 2 * 128 * (128 + 128), "barriers": 2 * 2 * 4 * 8}
    shared = module.kernel.shared[0]
    assert isinstance(shared, int)
    assert shared <= 228 * 1024 // BLOCKS - 1024
    assert sum(warps_registers(layout, config).values()) <= layout.entry_registers
    assert layout.entry_registers * layout.threads(config) * BLOCKS <= 65536
    assert layout.chosen(config) == {"RAW_TILES": 2}


def test_two_blocks_copy_three_tiles_ahead_where_the_schedule_says_nothing() -> None:
    module = planned()
    layout, config = layout_of(module)
    assert config.stages == 3
    assert 228 * 1024 // 3 < sum(layout.shared_memory(config).values()) <= 228 * 1024 // 2 - 1024
    split = module.kernel.split if isinstance(module.kernel, Decode) else None
    assert split is not None
    assert split.block_share == BLOCK_SHARE < 1


def test_sums_of_warps_take_the_place_of_tiles_that_are_smaller() -> None:
    layout, config = layout_of(planned(f"{OWN}, stages = 2", d=8, dv=128))
    assert layout.shared_memory(config)["tiles"] == max(2 * 128 * 256, 4 * 16 * (128 + 6) * 4)


@pytest.mark.parametrize(("v", "panels"), [("e4m3", 2), ("bf16", 3)])
def test_rows_are_read_as_they_are_stored(v: str, panels: int) -> None:
    layout, _ = layout_of(planned(v=v))
    assert layout.narrow.tensors == ("k", "v")
    assert layout.narrow.panels == panels


def test_the_bound_counts_the_sums_that_are_joined() -> None:
    assert planned().kernel.bound.splits == planned("warp_split = q").kernel.bound.splits + 4


def test_it_is_told_what_warps_do() -> None:
    kernel = planned().kernel
    told = "\n".join(SM90A.roles(kernel, kernel.configs[0]))
    assert "4 warps   168 registers a thread: copy 32 keys of a tile each by TMA" in told


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (f"{OWN}, tile.q = 64", "tile.q = 64 is not 16, where warp_split = kv: the rows of an mma"),
        (f"{OWN}, tile.kv = 64", "tile.kv = 64 is not 128, where warp_split = kv: 32 for each warp"),
        (f"{OWN}, warps = 8", "warps = 8 is not 4, where warp_split = kv: each with keys of its own"),
        (f"{OWN}, stages = 1", "stages = 1 leaves nothing to copy ahead"),
        (f"{OWN}, stages = 8", "shared memory"),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(knobs: str, told: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        modules_of(text(knobs))
    found = caught.value.diagnostics[0]
    assert found.code == "E0601"
    assert told in str(found)


@pytest.mark.parametrize(
    ("spec_text", "told"),
    [
        (text(d=192), "the head dimension 192 is more than 128"),
        (text(d=20), "the head dimension 20 is not a multiple of 8"),
        (text(d=128, dv=64, prefix=True), "warp_split = kv has no values that are in the keys"),
        (text(f"{OWN}, overlap = true"), "a decode kernel has no overlap to choose"),
        (text("warp_split in {q, kv}"), "warp_split"),
    ],
)
def test_what_cannot_be_is_refused_where_it_stands(spec_text: str, told: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        modules_of(spec_text)
    found = caught.value.diagnostics[0]
    assert found.code == "E0602"
    assert told in str(found)
