"""The cases that `attnc verify` runs: what they meet, and that they are cases."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from attnc.plan import ir
from attnc.plan.ir import pack_of
from attnc.reference import Floats, heads, to_arrays
from attnc.target.files import render_files
from attnc.target.triton.lists import ListsText
from attnc.verify.boundaries import Boundary, boundaries_of
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.cover import Coverage, Space, by_tiles
from attnc.verify.covering import covering_cases, listed_cases, thin_cases
from attnc.verify.data import EXTRAS, draw_lists, styles_for
from attnc.verify.inputs_read import lists
from attnc.verify.problem import build
from attnc.verify.projection_check import ProjectionTrial, projection_subject
from attnc.verify.storage import LENGTHS
from attnc.verify.strategies import fit_of
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import large_cases
from tests.plans import SPECS, module_of, plans_of
from tests.planted.registry import module_of as planted_module
from tests.planted.registry import projection_of
from tests.targets import TARGETS
from tests.verify.judging import assert_within_bound, spec, subject_of_text


def named(name: str, target: str = "triton") -> dict[str, set[int]]:
    """Points by the boundary's quantity."""
    found: dict[str, set[int]] = {}
    for boundary in boundaries_of(module_of(name, target)):
        found.setdefault(boundary.quantity, set()).update(boundary.points)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_says_where_it_changes_its_ways(target: str) -> None:
    tiles = named("causal_gqa", target)
    assert {63, 64, 65, 127, 128, 129} <= tiles["rows"] & tiles["keys"]
    assert {65535, 65536, 65537} <= tiles["heads"]
    assert {127, 128, 129, 16383, 16384, 16385} <= named("document", target)["entries"]
    assert {126, 127, 128} <= named("varlen", target)["sequences"]
    assert {15, 16, 17} <= named("decode", target)["packed"] & named("decode", target)["splits"]
    assert {15, 16, 17} <= named("paged_decode", target)["keys"]
    assert {4095, 4096, 4097} <= named("paged_decode", target)["columns"]


def test_programs_that_take_several_tiles_have_some() -> None:
    """One more than there are programs, one more than each has two of, and one more than each has stages of,
    of as many steps as a pipeline holds, and of one. What a program leaves behind, or does not give back,
    shows in its next tiles.
    """
    made = module_of("causal_gqa", "cuda.sm_90a")
    assert {5, 9, 13} <= named("causal_gqa", "cuda.sm_90a")["tiles"]
    assert not {"tiles"} & {*named("causal_gqa"), *named("decode", "cuda.sm_90a")}
    device = {b.value for b in boundaries_of(made, 132) if b.quantity == "tiles"}
    assert device == {132, 264, 396}
    subject = subject_of(made)
    thin = list(thin_cases(subject.space, subject.limits()))
    for is_long in (True, False):
        assert {5, 9, 13} <= {case.dims["B"] for case in thin if (case.dims["N"] >= 3 * 64) == is_long}


def test_the_last_query_of_a_tile_is_the_first_to_see_a_tile_of_keys() -> None:
    """Of a tile of heads that share keys, where the last query has some of its heads in the next tile."""
    subject = subject_of(module_of("speculative"))
    cases = [case for case in thin_cases(subject.space, subject.limits()) if case.dims["G"] == 5]
    (case,) = cases
    shape = subject.configs[case.config]
    last, rest = divmod(shape.BLOCK_M - 1, 5)
    assert rest < 4
    assert last + case.dims["N"] - case.dims["M"] == shape.BLOCK_N


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "variant", "old", "new"),
    [
        ("prefix_lm", "d64", "tl.maximum(first_pos + 1, prefix)", "tl.maximum(first_pos + 2, prefix)"),
        ("window", "d128", "full_hi = first_pos + 1", "full_hi = first_pos + 2"),
        ("window", "d128", "full_lo = tl.maximum(last_pos - ", "full_lo = tl.maximum(last_pos - 1 - "),
        ("causal_gqa", "bf16_d64", "(tl.maximum(kv_hi + M - N, 0)", "(tl.maximum(kv_hi + M - N - 1, 0)"),
    ],
)
def test_a_tile_of_keys_is_seen_but_for_one(name: str, variant: str, old: str, new: str) -> None:
    module = module_of(name, "triton", variant)
    subject = subject_of(module)
    rows = {3, subject.configs[subject.space.usable[-1]].BLOCK_M + 3}
    cases = [case for case in thin_cases(subject.space, subject.limits()) if case.dims["M"] in rows]
    text = render_files(module, path=f"{name}.attn", sha256="0")[f"{variant}.py"]
    assert text.count(old) == 1
    broken = subject_of(module, {f"{variant}.py": text.replace(old, new)})
    if "kv_hi" not in old:
        subject, broken = (replace(each, gradients=None) for each in (subject, broken))
    assert not all(check(broken, case).ok for case in cases)
    assert all(check(subject, case).ok for case in cases)


def test_a_lazy_maximum_moves() -> None:
    """Scores that rise by more than its headroom, and beyond all exponents, behind the first tile."""
    lines = (
        *("input q: f16[B, M, H, 16]", "input k, v: f16[B, N, H, 16]", "score = dot(q, k)"),
        *("normalize = softmax", "output o: f16[B, M, H, 16]"),
    )
    for softmax, wanted in (("online(rescale = lazy(8))", {"large", "huge"}), ("online", set())):
        made = subject_of_text(spec(lines, f"tile.q = 16, tile.kv = 16, softmax = {softmax}"))
        thin = thin_cases(made.space, made.limits())
        assert {case.logits for case in thin if case.dims["N"] == 17} == wanted


def test_a_lazy_maximum_moves_in_a_tile_that_a_mask_cuts() -> None:
    """There rows do not fail that rise by much: what they have so far is scaled."""
    module = module_of("local_sink", "cuda.sm_90a", "w128_d64")
    subject = subject_of(module)
    cases = [case for case in thin_cases(subject.space, subject.limits()) if "bump" in case.logits]
    assert len(cases) == 2
    text = render_files(module, path="local_sink.attn", sha256="0")["w128_d64.cu"]
    before, found, behind = text.partition("if (exceeds)")
    assert found
    assert "sum[r] *= alpha[r];" in behind
    behind = behind.replace("sum[r] *= alpha[r];", ";", 1)
    broken = subject_of(module, {"w128_d64.cu": before + found + behind})
    assert [check(broken, case).ok for case in cases] == [True, False]
    assert all(check(subject, case).ok for case in cases)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("store_chunk(o_row + 8 * (j + t), x[0], x[1], x[2], x[3]);", ";", [False, False]),
        ("o_row = args.o_ptr + b * args.stride_ob", "o_row = args.o_ptr", [True, False]),
    ],
    ids=["not stored", "of the first sequence"],
)
def test_rows_of_infinite_sums_are_stored_alone(old: str, new: str, shown: list[bool]) -> None:
    module = module_of("padding", "cuda.sm_90a")
    subject = subject_of(module)
    cases = [case for case in thin_cases(subject.space, subject.limits()) if "bump" in case.logits]
    text = render_files(module, path="padding.attn", sha256="0")["d64.cu"]
    assert text.count(old) == 1
    broken = replace(subject_of(module, {"d64.cu": text.replace(old, new)}), gradients=None)
    assert [check(broken, case).ok for case in cases] == shown


def test_splits_of_a_list_look_up_several_times() -> None:
    module = module_of("selected_tokens", "cuda.sm_90a")
    subject = subject_of(module)
    (case,) = (case for case in thin_cases(subject.space, subject.limits()) if case.dims["S"] > 1000)
    config = subject.configs[case.config]
    assert case.dims["S"] > config.splits * 2 * 8 * config.BLOCK_N
    assert case.dims["N"] >= case.dims["S"]
    (name,) = (name for name in render_files(module, path="s.attn", sha256="0") if name.endswith(".cu"))
    text = render_files(module, path="s.attn", sha256="0")[name]
    old = "if (taken == AT_ONCE) {\n                taken = 0;"
    assert text.count(old) == 1
    broken = subject_of(module, {name: text.replace(old, old.replace("taken = 0;", ""))})
    assert [check(one, case).ok for one in (subject, broken)] == [True, False]


def test_a_boundary_is_in_force_under_its_config() -> None:
    at = next(b for b in boundaries_of(module_of("causal_gqa")) if b.where == (("BLOCK_M", 128),))
    (config,) = (c for c in subject_of(module_of("causal_gqa")).configs[:1])
    assert at.is_in_force({at.kernel: config})
    assert not at.is_in_force({at.kernel: config._replace(BLOCK_M=64)})
    assert not at.is_in_force({})
    assert Boundary(name="any", quantity="rows", value=0).points == (0, 1)


@pytest.mark.parametrize(("window", "met"), [(5000, True), (2**31 - 1, False)])
def test_a_window_without_an_end_asks_for_no_case(window: int, met: bool) -> None:
    """Nor for billions of keys on a GPU."""
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "score = dot(q, k)",
        f"mask = window({window}, 0)",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
    )
    space = subject_of_text(spec(lines)).space
    assert any(boundary.of_mask for boundary in space.boundaries) == met
    assert max(case.dims["N"] for case in large_cases(space)) == 16385


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["causal_gqa", "document", "varlen", "paged_decode"])
def test_the_array_meets_what_it_can(name: str) -> None:
    subject = subject_of(module_of(name))
    space, limits = subject.space, subject.limits()
    cases = list(covering_cases(space, limits, 24))
    assert cases[:5] == list(covering_cases(space, limits, 5))[:5]
    assert len(list(covering_cases(space, limits, 1))) == 1
    assert any(min(case.dims[name] for name in ("M", "N", "Hkv", "G")) > 1 for case in cases)
    coverage = Coverage(space)
    fit = fit_of(space.attention, len(space.configs))
    for case in cases:
        coverage.note(case)
        assert Case.from_json(case.to_json()) == case
        assert fit.misfit(case) is None
    few = list(thin_cases(space, limits))
    for case in cases:
        assert limits.cost(case.dims, case.config) <= (limits.most if case in few else limits.work)
    reached = [met for met in coverage.summary.boundaries if met.boundary.reach == "default"]
    assert sum(len(met.met) for met in reached) >= 0.6 * sum(len(met.boundary.points) for met in reached)
    met, pairs = coverage.summary.pairs
    assert met >= 0.4 * pairs
    assert len(coverage.summary.missed) <= 3
    thin = [met for met in coverage.summary.boundaries if met.boundary.reach == "thin"]
    assert any(met.boundary.value + 1 in met.met for met in thin)


def find_plain(module: ir.Module) -> tuple[Subject, Case]:
    """The case of plain numbers and layouts among the first four of a module."""
    subject = subject_of(module)
    first = islice(covering_cases(subject.space, subject.limits(), 24), 4)
    lengths = "full" if "full" in subject.space.factors.get("lengths", ()) else "drawn"
    extras = "whole" if lists(subject.variant.attention) else "drawn"
    plain = Case(dims={}, lengths=lengths, extras=extras)
    (case,) = (case for case in first if replace(case, dims={}, seed=0, config=0) == plain)
    return subject, case


def count_tiles(subject: Subject, case: Case) -> tuple[int, int]:
    """How many tiles of queries see a key, and of how many tiles of keys one of them sees some. Tiles of keys
    that a list names one by one are those of the list.
    """
    attention, shape = subject.variant.attention, subject.configs[case.config]
    pack = None if subject.plan is None else pack_of(subject.plan.kernel)
    inputs = build(attention, case).inputs
    found: list[tuple[int, int]] = []
    for head in heads(attention, to_arrays(attention, inputs)):
        group = head.dims["H"] // head.dims["Hkv"] if pack else 1
        rows = 1 if pack and pack.alone else max(shape.BLOCK_M // group, 1)
        seen = [
            np.asarray(head.visible[at : at + rows].any(axis=0)) for at in range(0, len(head.visible), rows)
        ]
        listed = any(node.keys == 1 for node in lists(attention).values())
        starts = range(0, head.shape[1], shape.BLOCK_N)
        tiles = [
            -(-int(keys.sum()) // shape.BLOCK_N)
            if listed
            else sum(bool(keys[at : at + shape.BLOCK_N].any()) for at in starts)
            for keys in seen
        ]
        found.append((sum(map(bool, tiles)), max(tiles, default=0)))
    return max(found)


#: Specs whose mask keeps no more keys than a tile has: 49 of a window of an image.
OF_FEW_KEYS = ("swin",)


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", sorted(path.stem for path in SPECS.glob("*.attn")))
def test_one_of_the_first_cases_is_plain_and_has_several_tiles_each_way(name: str) -> None:
    """Whatever the mask, the storage and the target: what is wrong behind a first tile alone shows early."""
    modules = {
        (module.variant.attention.name, module.target): module for module in reversed(plans_of(name).modules)
    }
    for module in modules.values():
        subject, case = find_plain(module)
        queries, keys = count_tiles(subject, case)
        assert queries > 1, (module.target, case)
        assert keys > 1 or name in OF_FEW_KEYS, (module.target, case)


@pytest.mark.parametrize("name", ["linear"])
def test_one_of_the_first_products_is_plain_and_has_several_tiles_along_every_axis(name: str) -> None:
    subject = projection_subject(projection_of(name))
    first = islice(ProjectionTrial(subject).cases(24), 4)
    (case,) = (case for case in first if case == Case(dims=case.dims, config=case.config) and case.seed == 0)
    tiles = zip("NKM", subject.reach().tiles[case.config], strict=True)
    assert all(case.dims[axis] > tile for axis, tile in tiles)


@pytest.mark.parametrize("target", ["triton", "cuda.sm_90a"])
def test_pages_at_an_odd_stride_are_met_early(target: str) -> None:
    """While their rows, and the first page, begin at multiples of 16 bytes."""
    subject = subject_of(module_of("paged_decode", target))
    space, coverage = subject.space, Coverage(subject.space)
    for case in covering_cases(space, subject.limits(), 8):
        coverage.note(case)
    (met,) = (met for met in coverage.summary.boundaries if met.boundary.quantity == "strides")
    assert (met.boundary.name, met.met) == ("pages at an odd stride", (1,))
    k = next(tensor for tensor in space.tensors if tensor.name == "k")
    odd = space.layout(k, "odd")
    assert odd is not None
    case = Case(dims={"B": 2, "M": 1, "N": 40, "Hkv": 1, "G": 1, "P": 3}, layouts={"k": odd})
    placed = build(space.attention, case).inputs["k"]
    assert isinstance(placed, torch.Tensor)
    pages, *others = placed.stride()
    assert (pages, *others) == (math.prod(placed.shape[1:]) + 1, *torch.empty(placed.shape).stride()[1:])


@pytest.mark.slow
def test_more_cases_meet_more() -> None:
    space, limits = (made := subject_of(module_of("causal_gqa"))).space, made.limits()
    coverage, met = Coverage(space), []
    for case in covering_cases(space, limits, 64):
        coverage.note(case)
        met.append(coverage.summary.pairs[0])
    assert met[5] < met[23] < met[-1]
    assert met[-1] > 0.85 * coverage.summary.pairs[1]


def test_the_layouts_of_a_case_are_of_their_levels() -> None:
    space = subject_of(module_of("causal_gqa")).space
    names = {tensor.name for tensor in space.tensors}
    assert {"q", "k", "v", "o", "lse", "do", "dlse"} == names
    for tensor in space.tensors:
        for level in space.layouts_for(tensor):
            assert space.level_of(space.layout(tensor, level)) == level
    assert "rows" in space.layouts_for(next(t for t in space.tensors if t.name == "do"))


@pytest.mark.parametrize(
    ("length", "level"), [(0, ""), (1, "1"), (5, "short"), (64, "tile"), (128, "2 tiles"), (129, "long")]
)
def test_lengths_beside_a_tile(length: int, level: str) -> None:
    assert by_tiles(length, 64) == level


@pytest.mark.parametrize("style", LENGTHS)
def test_sequences_of_every_style_of_length(style: str) -> None:
    dims = {"Hkv": 1, "G": 1, "M": 9, "N": 7, "B": 3}
    space = subject_of(module_of("varlen")).space
    found = space.facts(Case(dims=dims, lengths=style)).sizes
    assert found["sequences"] == {3}
    assert max(found["rows"]) <= 9
    assert (0 in found["rows"]) == (style in ("empty", "beyond")) or style in ("drawn", "beyond")


def test_facts_follow_the_lengths_that_a_spec_declares() -> None:
    space = subject_of(module_of("decode")).space
    dims = {"B": 4, "M": 2, "Hkv": 1, "G": 3, "N": 40}
    full = space.facts(Case(dims=dims, lengths="full")).sizes
    assert (full["keys"], full["packed"], full["heads"]) == tuple(map(frozenset, ({40}, {6}, {12})))
    assert max(space.facts(Case(dims=dims, lengths="beyond")).sizes["keys"]) <= 40
    assert space.facts(Case(dims=dims, lengths="empty")).sizes["keys"] == {0, 40}


def test_styles_of_other_inputs() -> None:
    attention = module_of("bias").variant.attention
    dims = {"B": 1, "H": 2, "M": 6, "N": 8}

    def bias(style: str) -> Floats:
        value = build(attention, Case(dims=dims, extras=style)).inputs["pair"]
        assert isinstance(value, torch.Tensor)
        return np.asarray(value.float())

    styles = {
        "drawn",
        "zero",
        "one",
        "negative",
        "masked",
        "many",
        "runs",
        "far",
        "divisors",
        "steep",
        "endless",
        "whole",
        "late",
    }
    assert set(EXTRAS) == styles
    assert not bias("zero").any()
    assert (bias("one") == 1).all()
    assert (bias("negative") <= 0).all()
    assert np.isneginf(bias("masked")).all(axis=-1).any()
    assert not (np.abs(bias("far")) > 20).any()


DIVIDED = """
attention divided {
  input q: f32[B, H, M, 16]
  input k, v: f32[B, H, N, 16]
  input step: i32[B, N]
  input other: i32[H]
  score = dot(q, k) + 0.01 * ((other[h] - kv_idx) % step[b, kv_idx])
  mask = (other[h] + q_pos - kv_idx) // step[b, kv_idx] <= 2
  normalize = softmax
  output o: f32[B, H, M, 16]
}
schedule divided for triton { loops = [q, kv], tile.q = 16, tile.kv = 16 }
"""


def test_what_divides_integers_is_0_and_negative_too() -> None:
    subject = subject_of_text(DIVIDED)
    attention = subject.variant.attention
    assert styles_for(attention)[-1] == "divisors"
    assert "divisors" not in styles_for(module_of("bias").variant.attention)
    case = Case(dims={"B": 2, "H": 4, "M": 20, "N": 40}, extras="divisors", seed=3)
    inputs = build(attention, case).inputs
    step, other = inputs["step"], inputs["other"]
    assert isinstance(step, torch.Tensor)
    assert {0, -1, -(2**31), 2**31 - 1} <= {*step.flatten().tolist()}
    assert torch.equal(
        torch.as_tensor(other),
        torch.as_tensor(build(attention, replace(case, extras="drawn")).inputs["other"]),
    )
    assert_within_bound(subject, case)


def test_gates_are_so_far_from_0_that_exponentials_overflow() -> None:
    attention = module_of("gated").variant.attention
    dims = {"B": 1, "Hkv": 1, "G": 1, "M": 40, "N": 8}
    gate = build(attention, Case(dims=dims, extras="far")).inputs["gate"]
    assert isinstance(gate, torch.Tensor)
    found = gate.float()
    assert all(bool(each.any()) for each in (found < -100, found > 100, found.abs() < 4))


def test_gradients_of_rows_that_a_bias_masks_are_right() -> None:
    assert_within_bound(
        subject_of(module_of("bias")), Case(dims={"B": 1, "H": 1, "M": 40, "N": 20}, extras="masked")
    )


def test_dropout_may_drop_everything() -> None:
    assert_within_bound(
        subject_of(module_of("dropout")), Case(dims={"B": 1, "H": 1, "M": 5, "N": 20}, extras="one")
    )


def test_results_of_the_module_s_own_are_judged_too() -> None:
    made = subject_of_text(
        spec(
            (
                "input q: f32[B, M, H, 16]",
                "input k, v: f32[B, N, H, 16]",
                "score = dot(q, k)",
                "normalize = softmax",
                "output o: f32[B, M, H, 16]",
            )
        )
    )
    assert_within_bound(made, Case(dims={"B": 1, "M": 3, "H": 1, "N": 4}, call="new"))
    module: Any = made.module
    real = module.spec
    module.spec = lambda *given, **named: real(*given, **named) + (1 if named["out"] is None else 0)
    assert not check(made, Case(dims={"B": 1, "M": 3, "H": 1, "N": 4}, call="new")).ok
    assert_within_bound(made, Case(dims={"B": 1, "M": 3, "H": 1, "N": 4}))


@pytest.mark.parametrize("target", TARGETS)
def test_some_row_is_outweighed_by_each_half_of_65_splits(target: str) -> None:
    """A maximum that leaves out splits overflows only if one of them outweighs all that it looks at."""
    space, limits = (made := subject_of(module_of("decode", target))).space, made.limits()
    (case,) = (case for case in thin_cases(space, limits) if case.logits == "own_key")
    config = space.configs[case.config]
    assert (config.splits, case.dims["N"]) == (65, 65 * config.BLOCK_N)
    q, k = (torch.as_tensor(build(space.attention, case).inputs[name]).float().numpy() for name in "qk")
    scores = (q[0, :, 0] @ k[0, :, 0].T) / math.sqrt(q.shape[-1])
    best = np.sort(np.argmax(scores, axis=1) // config.BLOCK_N)
    assert best[0] < 32 <= best[len(best) // 2]
    others = np.sort(scores, axis=1)[:, -2]
    assert (scores.max(axis=1) - others > 88).all()  # e^88 is no float32


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
def test_rows_begin_in_the_middle_of_16_bytes(target: str) -> None:
    space, limits = (made := subject_of(module_of("gated", target))).space, made.limits()
    cases = [case for case in covering_cases(space, limits, 4) if len(case.layouts) == len(space.tensors)]
    (case,) = (case for case in cases if {layout.offset for layout in case.layouts.values()} <= {2, 4})
    problem = build(space.attention, case)
    for name in ("q", "gate"):
        tensor = problem.inputs[name]
        assert isinstance(tensor, torch.Tensor)
        assert tensor.data_ptr() % 16 == 8
        assert {place % 16 for place in (tensor[0, 0, 1].data_ptr(), tensor[0, 1, 0].data_ptr())} == {0, 8}


def test_thin_cases_are_affordable_and_long() -> None:
    made = subject_of(module_of("document"))
    longest = [max(case.dims.values()) for case in thin_cases(made.space, made.limits())]
    assert 16385 in longest
    assert 4097 in longest


def test_more_lists_are_inverted_than_fit_in_a_chunk() -> None:
    """Where so many queries are affordable: on a GPU."""
    made = subject_of(planted_module("many_lists", "triton"))
    limits = replace(made.limits(), most=20_000)
    chunk = ListsText.rows_of_program
    cases = [case for case in thin_cases(made.space, limits) if case.dims.get("R", 0) > chunk]
    assert len(cases) == 2
    for case in cases:
        assert case.dims["M"] == chunk * 16 + 1
        assert limits.includes_gradients(case.dims, case.config)


@pytest.mark.parametrize("distinct", [True, False])
def test_entries_of_a_long_list_come_again_far_behind_unless_it_is_distinct(distinct: bool) -> None:
    for seed in range(8):
        drawn = draw_lists(np.random.default_rng(seed), (2, 198), 400, distinct=distinct)
        named = (drawn >= 0) & (drawn < 400)
        again = (named[:, 190:] & (drawn[:, 190:] == drawn[:, :8])).any()
        assert again == (not distinct and bool(named[:, :8].any()))


def test_a_block_that_a_number_of_the_mask_cuts_is_whole_in_a_case_of_runs() -> None:
    made = subject_of(planted_module("kept_ends", "triton"))
    keys = [case.dims["N"] for case in thin_cases(made.space, made.limits()) if case.extras == "runs"]
    assert keys == [1024] * 3


def test_nothing_is_known_of_a_module_without_a_plan() -> None:
    made = subject_of(module_of("bias"))
    space = Space(attention=made.variant.attention, configs=made.configs, usable=(0,))
    assert not space.boundaries
    assert list(covering_cases(space, made.limits(), 2))


SLOPED = """
attention sloped {
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  input slope: f32[H]
  input sink: bf16[H]
  score = dot(q, k) - slope[h] * (q_pos - kv_idx)
  mask = kv_idx < q_pos
  normalize = softmax(sink = sink[h])
  output o: f32[B, M, H, 16]
  output lse: f32[B, H, M]
}
schedule sloped for triton { tile.q = 16, tile.kv = 16 }
"""


def test_slopes_are_infinite_and_sinks_far_from_scores() -> None:
    subject = subject_of_text(SLOPED)
    attention = subject.variant.attention
    assert styles_for(attention)[-2:] == ("far", "steep")
    case = Case(dims={"B": 1, "H": 64, "M": 5, "N": 9}, seed=2)

    def drawn(style: str) -> tuple[set[float], set[float]]:
        inputs = build(attention, replace(case, extras=style)).inputs
        return tuple(set(torch.as_tensor(inputs[name]).tolist()) for name in ("slope", "sink"))  # type: ignore[return-value]  # of two

    assert {-math.inf, math.inf, 0.0} <= drawn("steep")[0]
    assert max(map(abs, drawn("far")[0] | drawn("steep")[1])) < 10
    assert {-math.inf, -300.0, -90.0, 90.0, 300.0} <= drawn("far")[1]
    assert_within_bound(subject, replace(case, extras="far"))
    assert_within_bound(subject, replace(case, extras="steep"))


def test_the_last_queries_have_no_list_in_a_case() -> None:
    """Elsewhere each block has one, and a kernel that takes the first list for it is right."""
    made = subject_of(planted_module("blocks", "triton"))
    every = covering_cases(made.space, made.limits(), 24)
    fewer = [
        case.dims for case in every if 0 < case.dims["R"] * 32 < case.dims["M"] and case.extras == "whole"
    ]
    assert fewer == [{"B": 1, "M": 33, "Hkv": 1, "G": 1, "N": 37, "R": 1, "S": 4}]


def test_lists_of_tokens_have_more_entries_than_blocks_have_threads() -> None:
    space = subject_of(planted_module("latent_tokens", "triton")).space
    assert any(case.dims["S"] > 256 and case.dims["M"] > 1 for case in listed_cases(space))
