"""How masks that list blocks become walks over them: which list a tile has, which tiles divide its blocks."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.plan.ir import Let, Module, Regions
from attnc.plan.lists import listing_of, lists_blocks, without_list
from tests.plan.planning import planned, resolved
from tests.refusals import refusal
from tests.verify.judging import modules_of

OF_HEADS = "idx: i32[B, H, R, S]"
DECODING = "  loops = [kv], pack = gqa"


def tiles(module: Module) -> set[tuple[int, int]]:
    return {(config.tile_q, config.tile_kv) for config in module.kernel.configs}


def line(regions: Regions) -> str:
    """Which list a tile has."""
    (found,) = (item for item in regions.bounds if isinstance(item, Let) and item.name == "list_line")
    return show(found.value)


@pytest.mark.parametrize(
    ("mask", "rest"),
    [
        ("listed(idx, rows = 32, keys = 48)", "true"),
        ("causal and listed(idx, rows = 32, keys = 48)", "kv_idx <= q_pos"),
        ("kv_idx < 9 and listed(idx, rows = 32, keys = 48) and kv_idx > 3", "kv_idx < 9 and kv_idx > 3"),
    ],
)
def test_the_rest_of_a_mask_is_what_stands_beside_the_list(mask: str, rest: str) -> None:
    attention = resolved(mask, inputs=(OF_HEADS,))[0].attention
    listing = listing_of(attention)
    assert listing is not None
    assert (listing.rows, listing.keys, listing.row_axis, listing.gathers) == (32, 48, 2, False)
    assert show(listing.rest) == show(without_list(attention).mask) == rest
    assert lists_blocks(attention)
    assert not lists_blocks(without_list(attention))


@pytest.mark.parametrize("keys", [1, 4, 24])
def test_tiles_are_gathered_from_blocks_that_they_do_not_divide(keys: int) -> None:
    attention = resolved(f"listed(idx, rows = 1, keys = {keys})", inputs=("idx: i32[B, M, S]",))[0].attention
    listing = listing_of(attention)
    assert listing is not None
    assert listing.gathers


def test_a_mask_without_a_list_or_with_one_that_keys_need_not_be_in_is_no_listing() -> None:
    plain = resolved("causal")[0].attention
    either = resolved("causal or listed(idx, rows = 32, keys = 48)", inputs=(OF_HEADS,))[0].attention
    assert listing_of(plain) is None
    assert listing_of(either) is None
    assert (lists_blocks(plain), lists_blocks(either)) == (False, True)


@pytest.mark.parametrize(
    ("lists", "mask", "of_queries", "of_keys"),
    [
        (
            OF_HEADS,
            "listed(idx, rows = 32, keys = 48)",
            "where(q_lo // 32 >= R, -1, (b * H + h) * R + q_lo // 32)",
            "(b * H + h) * list_blocks + kv_lo // 48",
        ),
        (
            "idx: i32[R, S]",
            "listed(idx, rows = 32, keys = 48)",
            "where(q_lo // 32 >= R, -1, q_lo // 32)",
            "kv_lo // 48",
        ),
        (
            "idx: i32[R, H, B, S]",
            "listed(idx, rows = 32, keys = 48)",
            "where(q_lo // 32 >= R, -1, (q_lo // 32 * H + h) * B + b)",
            "(h * B + b) * list_blocks + kv_lo // 48",
        ),
        (
            "idx: i32[B, C, R, S]",
            "listed(idx[b, h - 1, q_idx // 32], keys = 48)",
            "where(h - 1 < 0 or h - 1 >= C or q_lo // 32 >= R, -1, (b * C + (h - 1)) * R + q_lo // 32)",
            (
                "where(where(h - 1 < 0 or h - 1 >= C, -1, b * C + (h - 1)) < 0, -1, "
                "where(h - 1 < 0 or h - 1 >= C, -1, b * C + (h - 1)) * list_blocks + kv_lo // 48)"
            ),
        ),
    ],
)
def test_a_tile_has_the_list_of_its_block(lists: str, mask: str, of_queries: str, of_keys: str) -> None:
    """-1 where there is none: a list outside of the tensor is empty."""
    module = planned(mask, inputs=(lists,), grads="q, k, v", schedule="  stages = 2")
    kernels = module.backward_kernels
    assert line(module.kernel.regions) == line(kernels["dq"].regions) == of_queries
    assert line(kernels["dkdv"].regions) == of_keys


def test_triton_walks_over_numbers_in_one_loop_and_hopper_over_bits_in_all() -> None:
    mask, options = (
        "listed(idx, rows = 128, keys = 128) and causal",
        {"inputs": (OF_HEADS,), "grads": "q, k, v"},
    )
    found = {}
    for target in ("triton", "cuda.sm_90a"):
        module = planned(mask, target=target, schedule="  stages = 2", **options)
        kernels = (module.kernel, module.backward_kernels["dq"], module.backward_kernels["dkdv"])
        found[target] = [
            [loop.listed.memory for loop in kernel.regions.loops if loop.listed] for kernel in kernels
        ]
    assert found == {
        "triton": [["lists"], ["lists"], ["columns"]],
        "cuda.sm_90a": [["list_bits"] * 2, ["list_bits"] * 2, ["row_bits"] * 2],
    }


@pytest.mark.parametrize(
    ("lists", "mask", "sizes"),
    [
        (
            "idx: i32[B, R, S]",
            "listed(idx, rows = 32, keys = 48)",
            ["(N + 47) // 48", "min(R, (M + 31) // 32)"],
        ),
        ("idx: i32[B, M, S]", "listed(idx, rows = 1, keys = 16)", ["(N + 15) // 16", "M"]),
        ("idx: i32[B, S]", "listed(idx, keys = 16)", ["(N + 15) // 16"]),
    ],
)
def test_sizes_are_of_all_blocks_that_the_call_has(lists: str, mask: str, sizes: list[str]) -> None:
    module = planned(mask, inputs=(lists,), schedule=DECODING)
    assert [show(size.value) for size in module.sizes if size.name.startswith("list_")] == sizes


@pytest.mark.parametrize(
    ("rows", "keys", "schedule", "found"),
    [
        (32, 48, "  stages = 2", {(32, 16)}),  # the greatest that divide both
        (64, 64, "  tile.q in {64, 128}, tile.kv in {32, 128}", {(64, 32)}),
        (64, 64, "  tile.q = 32, stages = 2", {(32, 64)}),
    ],
)
def test_tiles_divide_blocks(rows: int, keys: int, schedule: str, found: set[tuple[int, int]]) -> None:
    assert (
        tiles(planned(f"listed(idx, rows = {rows}, keys = {keys})", inputs=(OF_HEADS,), schedule=schedule))
        == found
    )


@pytest.mark.parametrize(
    ("mask", "lists", "schedule", "told"),
    [
        (
            "listed(idx, rows = 24, keys = 64)",
            OF_HEADS,
            "  stages = 2",
            "blocks of 24 queries are not lowered: rows = 24",
        ),
        (
            "listed(idx, rows = 64, keys = 8)",
            OF_HEADS,
            "  stages = 2",
            "blocks of 8 keys are not lowered: keys = 8",
        ),
        (
            "listed(idx[b, q_idx, h % 2], keys = 16)",
            "idx: i32[B, M, R, S]",
            DECODING,
            "a tile of all heads of a group has one list: lists differ between these heads",
        ),
        (
            "listed(idx, rows = 1, keys = 16)",
            "idx: i32[B, M, S]",
            f"{DECODING}, split.kv = fixed(64)",
            "splits of lists have no fixed size: a list has fewer keys",
        ),
        (
            "listed(idx, rows = 64, keys = 64)",
            OF_HEADS,
            "  tile.kv = 128",
            "tiles of 128 keys do not divide the listed blocks of 64: a block has 64 keys",
        ),
    ],
)
def test_lists_that_tiles_cannot_follow_are_refused(mask: str, lists: str, schedule: str, told: str) -> None:
    """More of them have goldens: `tests/golden/diagnostics/E0602_lists_*`."""
    assert refusal(planned, mask, inputs=(lists,), schedule=schedule) == f"E0602 {told}"


@pytest.mark.parametrize("group", ["h // G", "h // 4"])
def test_lists_of_kv_heads_are_known_where_heads_are_numbers(group: str) -> None:
    """A tile has all heads of a K/V head: lists that differ between these would be refused."""
    heads = ("Hkv * G", "Hkv") if "G" in group else ("8", "2")
    text = f"""attention a {{
  input q: bf16[B, M, {heads[0]}, 64]
  input k, v: bf16[B, N, {heads[1]}, 64]
  input idx: i32[B, {heads[1]}, M, S]
  score = dot(q, k)
  mask = listed(idx[b, {group}, q_idx], keys = 64) and causal
  normalize = softmax
  output o: bf16[B, M, {heads[0]}, 64]
  grad q, k, v
}}

schedule a for triton {{
  loops = [kv], pack = gqa
}}
"""
    (module,) = modules_of(text)
    assert module.backward is not None
