"""What the Hopper target decides of decoding: layouts, legality, refusals."""

from __future__ import annotations

import pytest

from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan.ir import Decode, Module
from attnc.plan.lower import plan
from attnc.plan.sm90 import SM90A, decode_layout_of
from attnc.plan.sm90.decode import sm90_decode_registers
from attnc.plan.sm90.decode_layout import BLOCKS, REGISTERS
from attnc.plan.sm90.layout import hopper
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.refusals import refusal

ROOM = 232448
#: Of a multiprocessor, in bytes; what the system takes of each block.
ALL, RESERVED = 233472, 1024


def planned(
    schedule: str = "",
    *,
    d: int = 128,
    dv: int = 0,
    page: int = 0,
    dtype: str = "bf16",
    mask: str = "causal",
) -> Module:
    """The module of a decode spec: GQA with K and V, or with dv one head of keys whose first dv columns are
    the values.
    """
    paged = f" via paged(table, page = {page})" if page else ""
    heads = "1" if dv else "Hkv"
    values = (
        f"input v: {dtype}[B, N, 1, {dv}] via prefix(k)" if dv else f"input v: {dtype}[B, N, Hkv, {d}]{paged}"
    )
    queries = "G" if dv else "Hkv * G"
    lines = (
        f"input q: {dtype}[B, M, {queries}, {d}]",
        f"input k: {dtype}[B, N, {heads}, {d}]{paged}",
        values,
        *(["input table: i32[B, P]"] if page else []),
        "input lens: i32[B]",
        "length N = lens[b]",
        f"score = dot(q, k) / sqrt({d})",
        f"mask = {mask}",
        "normalize = softmax",
        f"output o: {dtype}[B, M, {queries}, {dv or d}]",
    )
    body = "\n  ".join(lines)
    split = "" if "split.kv" in schedule else "split.kv = auto"
    knobs = f"loops = [kv], pack = gqa\n  {split}\n  {schedule}"
    text = f"attention under_test {{\n  {body}\n}}\nschedule under_test for cuda.sm_90a {{\n  {knobs}\n}}\n"
    program = resolve(parse(Source("under_test.attn", text)), prelude())
    (variant,) = variants(program, program.attentions[0])
    return plan(variant, program.schedules[0])


@pytest.mark.parametrize(
    ("d", "dv", "page", "consumers"),
    [(64, 0, 0, 1), (128, 0, 16, 1), (256, 0, 64, 1), (192, 128, 0, 1), (576, 512, 64, 2), (576, 512, 16, 2)],
)
def test_a_schedule_that_says_nothing_gets_tiles_that_fit(d: int, dv: int, page: int, consumers: int) -> None:
    kernel = planned(d=d, dv=dv, page=page).kernel
    config, layout = kernel.configs[0], decode_layout_of(kernel)
    assert (config.tile_q, hopper(config).consumers, config.warps) == (64, consumers, 4 * (consumers + 1))
    assert kernel.shared[0] == sum(layout.shared_memory(config).values()) <= ROOM
    assert sum(layout.registers(config).values()) < REGISTERS[consumers][1]
    assert layout.columns(config) * consumers == (dv or d)


@pytest.mark.parametrize(
    ("knobs", "d", "stages", "short"),
    [
        ("softmax = online(maximum = lazy(20))", 128, [3, 2], 7),
        ("softmax = online(maximum = lazy(20))", 64, [4, 2], 7),
        ("softmax = online(maximum = lazy(20))", 256, [2], 0),
        ("softmax = online(maximum = lazy(20)), stages = 3", 128, [3], 0),
        ("", 128, [3], 0),
    ],
)
def test_short_walks_of_a_lazy_maximum_have_two_stages(
    knobs: str, d: int, stages: list[int], short: int
) -> None:
    kernel = planned(", ".join(filter(None, ["tile.q = 128, overlap = true", knobs])), d=d).kernel
    assert isinstance(kernel, Decode)
    assert kernel.split is not None
    assert ([config.stages for config in kernel.configs], kernel.split.short) == (stages, short)


def test_blocks_can_share_the_columns_of_o() -> None:
    kernel = planned(d=576, dv=512, page=64).kernel
    layout = decode_layout_of(kernel)
    assert [config.tile_d for config in kernel.configs] == [512, 256]
    assert [layout.sharers(config) for config in kernel.configs] == [1, 2]
    assert len(planned("tile.d = 512", d=576, dv=512).kernel.configs) == 1
    assert len(planned(d=192, dv=128).kernel.configs) == 1  # 64 columns for each warpgroup already
    for config in kernel.configs:
        assert sum(sm90_decode_registers(layout, config).values()) <= REGISTERS[2][1]


@pytest.mark.parametrize(
    ("d", "mask", "keys"),
    [(64, "causal", 128), (64, "window(256, 0)", 128), (64, "window(255, 0)", 64), (128, "causal", 64)],
)
def test_narrow_rows_come_in_wide_tiles_where_two_do_not_hold_all_keys(d: int, mask: str, keys: int) -> None:
    assert planned(d=d, mask=mask).kernel.configs[0].tile_kv == keys


@pytest.mark.parametrize(("d", "dv", "size"), [(64, 0, 64), (64, 0, 192), (192, 128, 64), (64, 0, 256)])
def test_splits_of_a_fixed_size_are_made_of_whole_tiles(d: int, dv: int, size: int) -> None:
    configs = planned(f"split.kv = fixed({size})", d=d, dv=dv).kernel.configs
    assert [size % config.tile_kv for config in configs] == [0] * len(configs)


def test_two_blocks_of_one_warpgroup_live_on_a_multiprocessor() -> None:
    for d in (64, 128):
        (shared,) = planned(d=d).kernel.shared
        assert isinstance(shared, int)
        assert 2 * (shared + RESERVED) <= ALL


@pytest.mark.parametrize("consumers", [1, 2])
def test_registers_of_both_roles_are_those_that_the_launch_holds(consumers: int) -> None:
    """setmaxnreg would wait for ever for more."""
    copying, multiplying = REGISTERS[consumers]
    assert (copying + consumers * multiplying) * 128 * BLOCKS[consumers] <= 65536
    assert copying % 8 == multiplying % 8 == 0


@pytest.mark.parametrize(("page", "box"), [(0, 64), (16, 16), (48, 16), (64, 64), (256, 64)])
def test_keys_that_are_copied_at_once_lie_in_one_page(page: int, box: int) -> None:
    assert decode_layout_of(planned(page=page).kernel).box(64) == box


@pytest.mark.parametrize(
    ("page", "copies"),
    [(0, "boxes"), (8, "boxes"), (24, "boxes"), (1, "rows"), (4, "rows"), (12, "rows"), (20, "rows")],
)
def test_pages_that_hold_no_boxes_come_row_by_row(page: int, copies: str) -> None:
    kernel = planned(page=page).kernel
    assert decode_layout_of(kernel).copies == copies
    said = "copies rows of keys by cp.async" if copies == "rows" else "copies tiles"
    assert said in list(SM90A.roles(kernel, kernel.configs[0]))[1]


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (
            "tile.q = 16",
            {},
            "E0601 no config of schedule 'under_test' fits cuda.sm_90a: tile.q = 16 is not 64",
        ),
        ("warps = 4", {}, "warps = 4 is not 8: 4 for each of consumers = 1, and 4 that copy"),
        ("registers = 128", {}, "registers = 128 is not 216: what the launch holds"),
        ("tile.kv = 8", {}, "tile.kv = 8 is not a multiple of 16 up to 256"),
        ("stages = 1", {}, "stages = 1 leaves nothing to copy ahead"),
        ("tile.kv = 208", {"d": 16}, "one product has 192 columns at most, for a thread starts with 128"),
        ("consumers = 3", {}, "consumers = 3: one, or two that share the columns of o"),
        ("consumers = 2", {}, "consumers = 2 share a multiple of 128 columns of values that are in the keys"),
        (
            "consumers = 2",
            {"dv": 104},
            "consumers = 2 share a multiple of 128 columns of values that are in the",
        ),
        (
            "tile.kv = 64, stages = 3",
            {"d": 576, "dv": 512},
            "B of shared memory (q 73728 + k 221184 + p 8192",
        ),
        ("tile.kv = 128", {"d": 576, "dv": 512}, "tile.kv = 128: 64 at most"),
        ("stages = 4, tile.kv = 128", {}, "B of shared memory (q 16384 + k 131072 + v 131072 + barriers 128"),
        ("tile.kv = 256", {}, "needs about 284 registers a thread; one that multiplies has 216"),
        ("", {"dtype": "f32"}, "f32 is not lowered to cuda.sm_90a"),
        ("", {"d": 68}, "the head dimension 68 is not a multiple of 8"),
        (
            "",
            {"d": 520},
            "520 columns of o are not lowered to cuda.sm_90a: two warpgroups share them where they are not",
        ),
        ("tile.d = 256", {"d": 512}, "the head dimension stays whole in this CUDA kernel"),
        ("", {"d": 576, "dv": 320}, "320 columns of o are not lowered to cuda.sm_90a: two warpgroups share"),
        ("overlap = false", {}, "a decode kernel has no overlap to choose"),
        ("cluster = 2", {}, "a decode kernel has no clusters"),
        ("tile.d = 64", {}, "the head dimension stays whole in this CUDA kernel"),
        (
            "tile.d = 192",
            {"d": 576, "dv": 512},
            "tile.d = 192: blocks share 512 columns of o by multiples of 128",
        ),
        (
            "softmax = unified_max(phi = 0, bounds = [-60, 60], fallback = online)",
            {},
            "this softmax is not lowered",
        ),
        ("softmax = online(maximum = lazy(20))", {}, "the decode kernel has no lazy maximum"),
        ("consumers in {2, 3}", {}, "'consumers' shapes the text of a CUDA kernel"),
        ("persistent = true", {}, "the decode kernel is not persistent"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    schedule: str, options: dict[str, object], said: str
) -> None:
    assert said in refusal(planned, schedule, **options)


def test_roles_are_explained() -> None:
    kernel = planned(d=576, dv=512, page=64).kernel
    lines = list(SM90A.roles(kernel, kernel.configs[0]))
    assert (
        lines[2]
        == "  2 warpgroups  232 registers a thread: 256 of 512 columns of o each, p of every other tile"
    )
    assert lines[3] == "  10 mbarriers: keys 8, p 2"
