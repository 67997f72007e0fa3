"""What the Hopper target decides: which specs it takes, and which configs run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given as drawn_by
from hypothesis import settings
from hypothesis import strategies as st

from attnc.diagnostics import DiagnosticError
from attnc.plan.ir import Module
from attnc.plan.sm90 import SM90A, layout_of
from attnc.plan.sm90.layout import (
    hopper,
)
from attnc.target.files import render_files
from tests.plan.hopper import planned
from tests.refusals import refusal, refused
from tests.verify.judging import modules_of, spec

ROOM = 232448
#: Columns of heads between those of one box and of two, and what they get.
BETWEEN, THREE = (72, 80, 88, 96, 104, 112, 120), "consumers = 3, tile.kv = 64, stages = 4"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("d", range(8, 256, 16))
def test_rows_narrower_than_products_get_the_tiles_of_whole_ones(d: int) -> None:
    tiles = THREE if d == BETWEEN[-1] else ""
    narrow, whole = planned(d=d).kernel, planned(tiles, d=d + 8).kernel
    (few,), (many,) = narrow.configs, whole.configs
    assert replace(few, tile_d=many.tile_d) == many
    assert layout_of(narrow).shared_memory(few) == layout_of(whole).shared_memory(many)
    assert layout_of(narrow).registers(few) == layout_of(whole).registers(many)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("d", BETWEEN)
def test_heads_between_one_box_and_two_have_three_warpgroups(d: int) -> None:
    """Where no schedule says otherwise, and nothing is drawn, or copied for all of them."""

    def tiles(schedule: str = "", **changes: Any) -> tuple[int, int]:
        config = planned(schedule, d=d, **changes).kernel.configs[0]
        return config.tile_q, config.tile_kv

    assert tiles() == tiles(mask="causal") == (192, 64)
    assert tiles("consumers = 2") == tiles("tile.kv = 128") == (128, 128)
    assert all(tiles("", **FEATURES[name]) == (128, 128) for name in ("dropout", "pairs"))
    lines = [
        f"input q: bf16[Tq, H, {d}] via ragged(cu)", f"input k, v: bf16[Tq, H, {d}] via ragged(cu)",
        "input cu: i32[B + 1]", "score = dot(q, k)", "normalize = softmax", f"output o: bf16[Tq, H, {d}]",
    ]  # fmt: skip
    (packed,) = modules_of(spec(lines, "", target="cuda.sm_90a"))
    assert (packed.kernel.configs[0].tile_q, packed.kernel.configs[0].tile_kv) == (128, 128)


def test_heads_of_128_columns_have_three_warpgroups_under_a_causal_mask() -> None:
    def tiles(schedule: str = "", **changes: Any) -> tuple[int, int]:
        config = planned(schedule, d=128, **changes).kernel.configs[0]
        return config.tile_q, config.tile_kv

    assert tiles(mask="causal") == (192, 64)
    assert tiles() == tiles("stages = 2", mask="causal") == tiles("cluster = 2", mask="causal") == (128, 128)
    assert all(tiles(**FEATURES[name]) == (128, 128) for name in ("dropout", "pairs", "cap", "keys"))
    assert tiles(mask="causal", score="30.0 * tanh(dot(q, k) * 0.01)") == (128, 128)
    assert tiles(mask="causal", inputs=("lens: i32[B]\n  length N = lens[b]",)) == (128, 128)
    by_distance = "dot(q, k) + x[b, q_idx, h, q_pos - kv_idx]"
    assert tiles(mask="causal", score=by_distance, inputs=("x: bf16[B, M, H, R]",)) == (192, 64)
    assert tiles(mask="causal", score="dot(q, k) + x[h, kv_idx]", inputs=("x: f32[H, N]",)) == (128, 128)


#: What may take shared memory or registers besides rows of q, k and v.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "window(511, 0)"},
    "dropout": {"softmax": "softmax(dropout = p, seed = seed)", "inputs": ("p: f32[]", "seed: i64[]")},
    "pairs": {"score": "dot(q, k) + x[b, h, q_idx, kv_idx]", "inputs": ("x: bf16[B, H, M, N]",)},
    "wide pairs": {"score": "dot(q, k) + x[b, h, q_idx, kv_idx]", "inputs": ("x: f32[B, H, M, N]",)},
    "cap": {"score": "30.0 * tanh(dot(q, k) * 0.01)"},
    "keys": {"score": "dot(q, k) + x[b, kv_idx]", "inputs": ("x: f32[B, N]",)},
}


def tile_areas(d: int, feature: str) -> dict[str, int]:
    """Rows times keys of the tiles of kernels that no schedule chose, by their names."""
    module = planned("softmax = online(maximum = lazy(20))", d=d, grads="q, k, v", **FEATURES[feature])
    assert module.backward is not None
    kernels = {"forward": module.kernel} | {kernel.name: kernel for kernel in module.backward.kernels}
    found = {name: kernel.configs[0] for name, kernel in kernels.items()}
    return {name: config.tile_q * config.tile_kv for name, config in found.items()}


@settings(max_examples=15)
@drawn_by(d=st.integers(1, 31).map(lambda n: 8 * n), feature=st.sampled_from(sorted(FEATURES)))
def test_wider_heads_never_get_larger_tiles_and_none_jump(d: int, feature: str) -> None:
    """Gradients of more than 128 columns have other kernels than those of fewer."""
    narrow, wide = tile_areas(d, feature), tile_areas(d + 8, feature)
    for name in narrow if d != 128 else ["forward"]:
        most = 4 / 3 if name == "forward" and d == BETWEEN[-1] else 1.0
        assert most * narrow[name] >= wide[name] >= 0.5 * narrow[name], name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("d", [8, 16, 64, 72, 80, 96, 128, 136, 192, 256])
def test_a_schedule_that_says_nothing_gets_tiles_that_fit(d: int) -> None:
    kernel = planned(d=d).kernel
    (config,), layout = kernel.configs, layout_of(kernel)
    shape = layout.shape(config)
    assert config.tile_q == 64 * shape.consumers
    assert layout.threads(config) == 128 * (shape.consumers + 1)
    assert kernel.shared[0] == sum(layout.shared_memory(config).values()) <= ROOM
    assert sum(layout.registers(config).values()) < shape.consumer_registers
    assert layout.qk.width % 64 == 0


def test_tiles_that_nobody_chose_leave_room_for_what_dropout_keeps() -> None:
    drops: dict[str, Any] = {
        "softmax": "softmax(dropout = p, seed = seed)",
        "inputs": ("p: f32[]", "seed: i64[]"),
    }
    assert [planned(d=256, **more).kernel.configs[0].tile_kv for more in ({}, drops)] == [80, 64]
    assert "B of shared memory" in refusal(planned, "tile.kv = 80", d=256, **drops)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("d", [16, 64, 96, 128])
def test_random_numbers_of_dropout_leave_room_for_a_tile_of_a_load_for_each_pair(d: int, dtype: str) -> None:
    kernel = planned(
        "softmax = online(maximum = lazy(20))",
        d=d,
        score="dot(q, k) + x[b, h, q_idx, kv_idx]",
        softmax="softmax(dropout = p, seed = seed)",
        inputs=(f"x: {dtype}[B, H, M, N]", "p: f32[]", "seed: i64[]"),
    ).kernel
    layout = layout_of(kernel)
    assert layout.draws
    assert layout.pair_stages


def test_turns_are_one_more_field_of_configs_where_some_config_has_them() -> None:
    def configs(schedule: str) -> list[dict[str, int]]:
        kernel = planned(schedule, d=64).kernel
        return [layout_of(kernel).chosen(config) for config in kernel.configs]

    def text(schedule: str) -> str:
        files = render_files(planned(schedule, mask="window(100, 0)"), path="a.attn", sha256="")
        return "".join(files.values())

    assert all("PINGPONG" not in config for config in configs("consumers = 2") + configs("pingpong = false"))
    assert [config["PINGPONG"] for config in configs("pingpong in {false, true}")] == [0, 1]
    assert "PINGPONG" not in text("pingpong = false") == text("consumers = 3, tile.kv = 64, stages = 4")
    assert '#include "sm90_turns.cuh"' in text("pingpong = true")
    assert "int last_tile[CONSUMERS];" in text("pingpong = true")


def test_blocks_that_share_a_multiprocessor_share_its_registers_and_memory() -> None:
    one, two = planned("tile.kv = 64, stages = 4, overlap = false, blocks in {1, 2}", d=64).kernel.configs
    layout = layout_of(planned("blocks in {1, 2}, tile.kv = 64, overlap = false", d=64).kernel)
    assert (hopper(one).registers, hopper(two).registers) == (232, 96)
    for config in (one, two):
        shape, blocks = layout.shape(config), hopper(config).blocks
        registers = shape.consumers * shape.consumer_registers + shape.producer_registers
        assert 128 * blocks * registers <= 65536
        assert blocks * (sum(layout.shared_memory(config).values()) + 1024) <= 228 * 1024
        assert layout.chosen(config)["BLOCKS"] == blocks


def test_two_blocks_have_tiles_of_their_own_and_do_not_overlap() -> None:
    one, two, long, few = map(hopper, planned("blocks in {1, 2}", d=64).kernel.configs)
    assert (one.tile_q, one.tile_kv, one.stages, one.overlap) == (128, 128, 4, True)
    assert (two.tile_q, two.tile_kv, two.stages, two.overlap) == (128, 64, 4, False)
    assert (long.tile_q, long.tile_kv, long.stages, long.overlap) == (256, 64, 4, True)
    assert few == replace(two, stages=2)
    text = render_files(planned("blocks in {1, 2}", d=64), path="a.attn", sha256="")
    assert "if constexpr (OVERLAP)" in text["default.cu"]


def test_packed_sequences_whose_lengths_no_call_knows_have_one_block() -> None:
    lines = [
        "input q: bf16[Tq, H, 64] via ragged(cu)",
        "input k, v: bf16[Tq, H, 64] via ragged(cu)",
        "input cu: i32[B + 1]",
        "score = dot(q, k) / 8",
        "normalize = softmax",
        "output o: bf16[Tq, H, 64]",
    ]
    (module,) = modules_of(spec(lines, "blocks in {1, 2}", target="cuda.sm_90a"))
    assert "costs=" not in render_files(module, path="a.attn", sha256="")["default.py"]


def test_a_kernel_without_room_for_two_blocks_has_one() -> None:
    drops: dict[str, Any] = {
        "softmax": "softmax(dropout = p, seed = seed)",
        "inputs": ("p: f32[]", "seed: i64[]"),
    }
    (config,) = planned("blocks in {1, 2}", d=64, **drops).kernel.configs  # nor 256 rows
    assert hopper(config).blocks == 1


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("tile.kv = 128, blocks = 2", "128: one product has 96 columns at most"),
        ("tile.kv = 64, stages = 4, blocks = 2, overlap = true", "needs about 108 registers"),
        ("tile.kv = 64, stages = 8, blocks = 2, overlap = false", "the limit is 115712 B"),
        ("tile.kv = 64, blocks = 2, cluster = 2, overlap = false", "blocks = 2: one beside cluster = 2"),
    ],
)
def test_what_two_blocks_have_no_room_for_is_refused(schedule: str, said: str) -> None:
    assert said in refusal(planned, schedule, d=64)


def test_blocks_are_in_the_text_of_kernels_that_share_a_multiprocessor_alone() -> None:
    def text(schedule: str) -> str:
        return "".join(render_files(planned(schedule, d=64), path="a.attn", sha256="").values())

    tiles = "tile.kv = 64, stages = 4, overlap = false"
    assert text(tiles) == text(f"{tiles}, blocks = 1")
    shared = text(f"{tiles}, blocks = 2")
    assert "__launch_bounds__(THREADS, BLOCKS)" in shared
    assert "min(cdiv(M, BLOCK_M) * B * H, config.BLOCKS * multiprocessors())" in shared
    said = "E0602 a decode kernel has no blocks to choose: two where one warpgroup multiplies, else one"
    assert refusal(planned, "loops = [kv], blocks = 2") == said


def test_turns_of_a_decode_kernel_or_a_backward_are_refused_where_they_stand() -> None:
    said = "E0602 a decode kernel has no turns to choose: waits for memory, not for products"
    assert refusal(planned, "loops = [kv], pingpong = true") == said
    for phase in ("backward", "dq", "dkdv"):
        inside = "pingpong = true" if phase == "backward" else f"{phase} {{\npingpong = true\n}}"
        said = f"E0404 'pingpong' does not belong to the {phase} phase: a key of the forward phase"
        assert refusal(planned, f"backward {{\n{inside}\n}}", grads="q, k, v") == said


_BIAS = ("bias: f32[M, N]",)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 136, 192, 256])
@pytest.mark.parametrize(
    ("mask", "options", "is_short"),
    [
        ("window(100, 0)", {}, True),
        ("doc[b, q_pos] == doc[b, kv_idx]", {"inputs": ("doc: i32[B, N] is sorted",)}, True),
        ("causal", {}, False),
        ("kv_idx >= q_pos", {}, False),
        ("window(100, 0) and kv_idx % 192 < 64", {}, False),
        ("window(100, 0)", {"score": "dot(q, k) + bias[q_idx, kv_idx]", "inputs": _BIAS}, False),
        ("window(100, 0)", {"softmax": "softmax(dropout = 0.5, seed = s)", "inputs": ("s: i64[]",)}, False),
    ],
)
def test_masks_that_end_on_both_sides_get_warpgroups_with_keys_of_their_own(
    mask: str, options: dict[str, Any], is_short: bool, d: int
) -> None:
    """Three where their registers hold rows of d columns, else two; of rows of 256 they leave through v's
    memory, together.
    """
    module = planned(mask=mask, d=d, **options)
    config = hopper(module.kernel.configs[0])
    text = render_files(module, path="a.attn", sha256="")["default.cu"]
    ends_once = {80: ("causal", "kv_idx >= q_pos"), 128: ("causal",)}  # beside tiles of three anyway
    assert ("int last_tile[CONSUMERS];" in text) == ((is_short and d < 256) or mask in ends_once.get(d, ()))
    if is_short:
        wanted = (3, 64, 4) if d <= 128 else (2, 64, 2)
        assert (config.consumers, config.tile_kv, config.stages) == wanted


@pytest.mark.parametrize(
    ("schedule", "d"), [("", 192), ("stages = 2, consumers = 2", 128), ("tile.kv = 64", 64)]
)
def test_what_is_chosen_or_too_wide_stays_as_it_is(schedule: str, d: int) -> None:
    assert hopper(planned(schedule, mask="window(100, 0)", d=d).kernel.configs[0]).consumers == 2


def test_keys_follow_from_each_other() -> None:
    def sizes(schedule: str, d: int = 64) -> tuple[object, ...]:
        config = hopper(planned(schedule, d=d).kernel.configs[0])
        return config.tile_q, config.consumers, config.warps, config.registers

    assert sizes("tile.q = 192") == (192, 3, 16, 160)
    assert sizes("consumers = 4, tile.kv = 64") == (256, 4, 20, 112)
    assert sizes("consumers = 2, registers = 224") == (128, 2, 12, 224)
    assert sizes("tile.kv = 64", d=256) == (128, 2, 12, 240)


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        ("tile.q = 96", {}, "tile.q = 96 is not 64 rows for each of consumers = 2"),
        ("registers = 160", {}, "registers = 160: a thread starts with 168, and takes more"),
        ("tile.q = 128, consumers = 3", {}, "tile.q = 128 is not 64 rows for each of consumers = 3"),
        ("consumers = 2, warps = 8", {}, "warps = 8 is not 4 for each of consumers = 2, and 4 that copy"),
        ("tile.kv = 8", {}, "tile.kv = 8 is not a multiple of 16 up to 256"),
        ("stages = 1", {}, "stages = 1 leaves nothing to copy ahead"),
        ("consumers = 3, registers = 240", {}, "registers = 240: 160 at most"),
        (
            "consumers = 3, tile.kv = 192",
            {},
            "needs about 204 registers a thread; one that multiplies has 160",
        ),
        ("tile.kv = 128", {"d": 256}, "needs about 252 registers a thread"),
        (
            "consumers = 3, tile.kv = 208",
            {},
            "tile.kv = 208: one product has 192 columns at most, for a thread starts with 128 registers",
        ),
        (
            "tile.kv = 208",
            {"softmax": "softmax(dropout = p, seed = seed)", "inputs": ("p: f32[]", "seed: i64[]")},
            "tile.kv = 208: one product has 192 columns at most, for a thread starts with 128 registers",
        ),
        ("tile.kv = 128, stages = 4", {"d": 128}, "B of shared memory (q 32768 + k 131072 + v 131072"),
        ("", {"d": 36}, "the head dimension 36 is not a multiple of 8"),
        ("", {"d": 512}, "the head dimension 512 is more than 256"),
        ("", {"dtype": "f32"}, "f32 is not lowered to cuda.sm_90a"),
        ("loops = [kv, q]", {}, "loops = [kv, q] is not lowered to cuda.sm_90a"),
        ("warp_split = kv", {}, "'warp_split = kv' is not lowered"),
        ("persistent = false", {}, "kernels of cuda.sm_90a are persistent"),
        ("softmax = two_pass", {}, "this softmax is not lowered"),
        ("softmax in {online, two_pass}", {}, "'softmax' shapes the text of a CUDA kernel"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    schedule: str, options: dict[str, object], said: str
) -> None:
    assert said in refusal(planned, schedule, **options)


@pytest.mark.parametrize(("dtype", "headroom", "top"), [("bf16", 20.0, "0.0"), ("f16", 12.0, "14.0")])
def test_a_lazy_maximum_has_the_headroom_of_its_type(dtype: str, headroom: float, top: str) -> None:
    module = planned("softmax = online(maximum = lazy(20))", dtype=dtype)
    kernel = module.kernel
    assert kernel.softmax.headroom == headroom
    assert kernel.bound.largest_shift >= headroom
    assert kernel.bound.least_probability < 2.0 ** (14 if dtype == "f16" else 0) * 2.0**-headroom
    text = render_files(module, path="a.attn", sha256="")["default.cu"]
    assert f"constexpr float HEADROOM = {headroom}f" in text
    assert f"constexpr float P_TOP = {top}f" in text


#: What stands after the shapes of keys and values, and of queries; further inputs.
_APART = {
    "pages": (
        " via paged(table, page = 16)",
        "",
        "input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]",
    ),
    "packed sequences": (" via ragged(ends)", " via ragged(ends)", "input ends: i32[B + 1]"),
}


@pytest.mark.parametrize("cluster", ["cluster = 2", "cluster in {1, 2}", "cluster = 1"])
@pytest.mark.parametrize("storage", _APART)
def test_tiles_that_cannot_be_shared_are_refused(storage: str, cluster: str) -> None:
    of_keys, of_queries, more = _APART[storage]
    rows, keys = ("T", "S") if of_queries else ("B, M", "B, N")
    text = f"""attention a {{
  input q: bf16[{rows}, H, 64]{of_queries}
  input k, v: bf16[{keys}, H, 64]{of_keys}
  {more}
  score = dot(q, k)
  normalize = softmax
  output o: bf16[{rows}, H, 64]
}}
schedule a for cuda.sm_90a {{
  tile.kv = 64, {cluster}
}}
"""
    if cluster == "cluster = 1":
        assert modules_of(text)[0].kernel.configs[0].value("cluster") == 1
        return
    found = refused(modules_of, text)
    assert (found.code, found.message) == ("E0602", f"tiles of {storage} are not shared by a cluster")
    assert found.hints == ("write 'cluster = 1', or remove it",)


@pytest.mark.parametrize(
    ("page", "d", "tile", "copies", "left"),
    [
        (16, 128, 128, "boxes", 40),
        (4, 128, 128, "rows", 72),
        (1, 256, 64, "rows", 40),
        (16, 256, 80, "boxes", 24),
    ],
)
def test_who_copies_rows_keeps_registers_for_it(page: int, d: int, tile: int, copies: str, left: int) -> None:
    def module(schedule: str) -> Module:
        lines = [
            f"input q: bf16[B, M, H, {d}]",
            f"input k, v: bf16[B, N, H, {d}] via paged(table, page = {page})",
            "input table: i32[B, P]",
            "input lens: i32[B]",
            "length N = lens[b]",
            "score = dot(q, k)",
            "normalize = softmax",
            f"output o: bf16[B, M, H, {d}]",
        ]
        (made,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
        return made

    kernel = module("consumers = 2").kernel
    (config,), layout = kernel.configs, layout_of(kernel)
    assert (layout.copies, config.tile_kv, layout.shape(config).producer_registers) == (copies, tile, left)
    assert ("rows of keys by cp.async" in "".join(SM90A.roles(kernel, config))) == (copies == "rows")
    if copies == "rows":
        with pytest.raises(DiagnosticError) as raised:
            module("registers = 240")
        most = (2 * 168 + 168 - left) // 2
        assert f"registers = 240: {most} at most" in raised.value.diagnostics[0].primary.text


DOCUMENTS = {"inputs": ("doc: i32[B, N] is sorted",)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mask", "schedule", "options", "is_longest_first"),
    [
        ("causal and doc[b, q_pos] == doc[b, kv_idx]", "", DOCUMENTS, True),
        ("doc[b, q_pos] == doc[b, kv_idx]", "consumers = 3, tile.kv = 64", DOCUMENTS, True),
        ("causal and doc[b, q_pos] == doc[b, kv_idx]", "order = default", DOCUMENTS, False),
        ("window(511, 0)", "", {}, False),
        ("causal", "", {}, False),
        ("causal", "order = longest_first", {}, True),
        ("kv_idx < n[b]", "", {"inputs": ("n: i32[B]",)}, False),
    ],
)
def test_tiles_whose_first_keys_are_searched_for_come_by_length(
    mask: str, schedule: str, options: dict[str, Any], is_longest_first: bool
) -> None:
    """Unless the schedule says how they come."""
    assert planned(schedule, mask=mask, **options).kernel.grid.longest_first == is_longest_first
