"""How tiles of 8 bits lie beside those that they become, and which tiles cannot be converted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.model.dtypes import DType
from attnc.plan.ir import Module
from attnc.plan.sm90 import decode_layout_of
from attnc.plan.sm90.layout import hopper
from attnc.plan.sm90.narrow import Narrow, NarrowPart, narrow_misfit
from tests.refusals import refusal
from tests.verify.judging import modules_of, spec


def planned(knobs: str, *, k: str = "e4m3", v: str = "e4m3", d: int = 128, prefix: int = 0) -> Module:
    heads, shared = ("G", "1") if prefix else ("Hkv * G", "Hkv")
    lines = [
        f"input q: bf16[B, M, {heads}, {d}]",
        f"input k: {k}[B, N, {shared}, {d}]",
        f"input v: {v}[B, N, {shared}, {prefix or d}]{' via prefix(k)' if prefix else ''}",
        "score = dot(q, k)",
        "normalize = softmax",
        f"output o: bf16[B, M, {heads}, {prefix or d}]",
    ]
    (module,) = modules_of(spec(lines, f"loops = [kv], pack = gqa, {knobs}", target="cuda.sm_90a"))
    return module


def test_two_blocks_of_a_multiprocessor_have_room_for_tiles_of_8_bits() -> None:
    kernel = planned("tile.kv = 64, stages in {2, 1}").kernel
    layout = decode_layout_of(kernel)
    assert [layout.chosen(config) for config in kernel.configs] == [{"RAW_TILES": 2}, {"RAW_TILES": 4}]
    for config, shared in zip(kernel.configs, kernel.shared, strict=True):
        buffers = layout.shared_memory(config)
        assert shared == sum(buffers.values()) <= (228 * 1024) // 2 - 1024
        assert buffers["8 bits"] == layout.chosen(config)["RAW_TILES"] * 64 * 2 * 128


def test_one_block_has_more_room_where_two_have_none() -> None:
    kernel = planned("tile.kv = 64, stages = 2", d=256).kernel
    layout, (config,) = decode_layout_of(kernel), kernel.configs
    assert kernel.shared[0] == sum(layout.shared_memory(config).values()) <= 227 * 1024
    assert 2 * sum(layout.shared_memory(config).values()) > 228 * 1024
    assert layout.chosen(config)["RAW_TILES"] == 2


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("e4m3", "i8"), ("k", "v")),
        (("e5m2", "bf16"), ("k",)),
        (("bf16", "i8"), ("v",)),
        (("bf16", "bf16"), ()),
    ],
)
def test_what_has_8_bits_is_converted(types: tuple[str, str], expected: tuple[str, ...]) -> None:
    layout = decode_layout_of(planned("tile.kv = 64", k=types[0], v=types[1]).kernel)
    assert layout.narrow.tensors == expected
    assert layout.narrow.panels == len(expected)
    assert bool(layout.narrow) == bool(expected)


def test_values_in_the_keys_are_converted_with_them() -> None:
    layout = decode_layout_of(planned("tile.kv = 32, stages = 2", d=576, prefix=512).kernel)
    assert layout.narrow.parts == (NarrowPart(name="k", number=0, dtype=DType.E4M3, columns=576),)
    assert layout.narrow.panels == 5


def test_latents_of_8_bits_have_the_tiles_of_16_and_no_others() -> None:
    kernels = [planned("split.kv = 2", k=k, v=k, d=576, prefix=512).kernel for k in ("e4m3", "bf16")]
    layouts = [decode_layout_of(kernel) for kernel in kernels]
    narrow, wide = (kernel.configs[0] for kernel in kernels)
    assert (narrow.tile_kv, narrow.stages) == (wide.tile_kv, wide.stages) == (64, 2)
    assert "RAW_TILES" not in layouts[0].chosen(narrow)
    buffers, of_16_bits = (
        layout.shared_memory(config) for layout, config in zip(layouts, (narrow, wide), strict=True)
    )
    assert buffers == of_16_bits | {"statistics": of_16_bits["statistics"] // 2}  # sums come where p was
    assert layouts[0].mapped == ()
    assert layouts[1].mapped == ("k",)


def test_scales_of_all_blocks_of_a_row_have_room_beside_tiles_of_64_keys() -> None:
    kernel = planned("split.kv = 2", d=576, prefix=512).kernel
    layout = decode_layout_of(kernel)
    nine = replace(layout, narrow=Narrow(parts=(replace(layout.narrow.parts[0], block=64, scales=9),)))
    assert sum(nine.shared_memory(kernel.configs[0]).values()) <= layout.room


def test_what_loads_rows_to_registers_has_those_that_the_launch_holds() -> None:
    layout = decode_layout_of(planned("split.kv = 2", d=576, prefix=512).kernel)
    converting, multiplying = layout.registers_of(2)
    assert layout.copying == 2
    assert 2 * converting + 2 * multiplying == 4 * layout.entry_registers


@pytest.mark.parametrize(
    ("tile_kv", "fits"), [(16, False), (32, True), (48, False), (128, True), (160, False)]
)
def test_a_warp_has_runs_of_eight_rows_and_no_more_than_lanes(tile_kv: int, fits: bool) -> None:
    assert (narrow_misfit(tile_kv) is None) == fits


def test_tiles_that_cannot_be_converted_are_refused() -> None:
    assert "tile.kv = 48 is not a multiple of 32" in refusal(planned, "tile.kv = 48")
    assert refusal(planned, "tile.kv = 64, stages = 1", k="bf16", v="bf16")
    planned("tile.kv = 48", k="bf16", v="bf16")


@pytest.mark.parametrize(("k", "v", "what"), [("e4m3", "bf16", "keys"), ("bf16", "i8", "values")])
def test_two_warpgroups_share_columns_of_16_bits_or_of_latents(k: str, v: str, what: str) -> None:
    said = refusal(planned, "tile.kv = 32, stages = 2", k=k, v=v, d=384)
    assert f"384 columns of o beside {what} of" in said
    planned("tile.kv = 32, stages = 2", k="bf16", v="bf16", d=384)
    planned("tile.kv = 32, stages = 2", d=384, prefix=384)


def test_what_multiplies_gives_registers_to_what_converts() -> None:
    wide, narrow = (planned("tile.kv = 64", k=k, v=k).kernel for k in ("bf16", "e4m3"))
    found = [decode_layout_of(kernel).registers_of(1) for kernel in (wide, narrow)]
    assert found == [(40, 216), (48, 208)]
    assert [hopper(kernel.configs[0]).registers for kernel in (wide, narrow)] == [216, 208]
