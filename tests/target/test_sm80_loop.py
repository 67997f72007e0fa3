"""The loop over tiles of a kernel, as text."""

from __future__ import annotations

from dataclasses import replace

from attnc.model.dtypes import DType
from attnc.plan.ir import Module
from attnc.target.sm80.loop import TileLoop, loop_of
from tests.plans import module_of
from tests.verify.judging import modules_of, spec


def loop(name: str) -> TileLoop:
    return loop_over(module_of(name, "cuda.sm_80"))


def loop_over(module: Module) -> TileLoop:
    dtypes = {arg.tensor.name: DType(arg.tensor.dtype) for arg in module.args}
    return loop_of(module.kernel, dtypes)


def test_bounds_are_those_of_the_first_and_of_the_last_region() -> None:
    causal = loop("causal_gqa")
    assert (causal.lo, causal.hi, causal.end, causal.step) == ("0", "hi", "hi", "BLOCK_N")
    assert causal.masked == "kv_lo >= full_hi"
    assert causal.guard == ""


def test_zeros_begin_where_a_condition_on_keys_ends_the_loop() -> None:
    padded = loop("padding")
    assert padded.end_of_kept == "hi"
    assert replace(padded, end="split_hi").end_of_kept == "split_hi"
    assert loop("causal_gqa").end_of_kept == "N"


def test_keys_are_asked_for_where_a_condition_keeps_some_within_the_loop() -> None:
    lines = (
        *("input q: f16[B, M, H, 64]", "input k, v: f16[B, N, H, 64]", "input pad: i32[B, N]"),
        *("score = dot(q, k)", "mask = pad[b, kv_idx] > 0", "normalize = softmax"),
        "output o: f16[B, M, H, 64]",
    )
    (module,) = modules_of(spec(lines, "tile.q = 64, tile.kv = 64", target="cuda.sm_80"))
    found = loop_over(module)
    assert (found.keeps, replace(found, fills=False).keeps) == (", keeps", "")


def test_a_walk_goes_from_one_listed_tile_to_the_next() -> None:
    listed = loop("listed_blocks")
    assert listed.skips
    call = "next_listed(args._list_bits_ptr, list_line, (list_blocks + 31) / 32, kv_lo)"
    assert (listed.behind, listed.goes_on, listed.captures) == (call, f"= {call}", "[&]")
    assert listed.first == "next(-BLOCK_N)"
    usual = loop("causal_gqa")
    assert (usual.behind, usual.goes_on, usual.captures) == ("kv_lo + BLOCK_N", "+= BLOCK_N", "[]")


def test_lists_of_numbers_are_no_bits() -> None:
    """Of kernels for Hopper that decode, whose keys are the entries of a list."""
    assert not loop_over(module_of("selected_tokens", "cuda.sm_90a")).listed
