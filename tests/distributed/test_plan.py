"""Every visible (query, key) is computed by exactly one rank, which holds that key exactly once: over random
masks, sizes, lengths, packings, ranks and strategies, by brute force.
"""

import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.distributed.estimate import STRATEGIES, Rates, Strategy, rates_of
from attnc.distributed.explain import as_dict, as_text, example, least, sizes_known
from attnc.distributed.kernels import spec_of
from attnc.distributed.offers import (
    EVEN,
    Chunks,
    assignments,
    chunk_of_slices,
    chunk_rows,
    contiguous,
    even_out,
    exchange_chunks,
    group_into_chunks,
    longest_first,
    slices,
)
from attnc.distributed.plan import Plan, Planner, is_tied, make_plan, widths_of
from attnc.distributed.spans import BLOCK, CallSizes, Visibility, Widths
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.distributed import plain_plan
from tests.distributed.calls import HEADS, KV_HEADS, Call, calls, visibility
from tests.distributed.plain_plan import check_plan
from tests.distributed.specs import SPECS, text
from tests.expr.spell import spell
from tools.bench.ranks import CELLS, SPEC, RanksCell, sizes_of_cell

GOLDEN = Path(__file__).parent.parent / "golden"
WIDTHS = Widths(d=16, dv=16)


def check(plan: Plan, visible: npt.NDArray[np.bool_]) -> None:
    """Raises AssertionError naming what is computed twice, or by nobody."""
    sizes, chosen = plan.sizes, plan.chosen
    group = sizes.heads // sizes.kv_heads
    ranks = range(plan.ranks)
    owned = np.concatenate([plan.owned_rows(rank) for rank in ranks])
    assert np.array_equal(np.sort(owned), np.arange(sizes.queries)), "a query has one owner"
    owned = np.concatenate([plan.owned_keys(rank) for rank in ranks])
    assert np.array_equal(np.sort(owned), np.arange(sizes.keys)), "a key has one owner"
    count = np.zeros(visible.shape, np.int64)
    for rank in ranks:
        waiting = [part for part in plan.parts(rank) if not part.ready]
        assert waiting or not len(plan.keys(rank)), "who waits for nothing is sent nothing"
        places = np.concatenate([part.keys for part in waiting]) if waiting else plan.keys(rank)
        assert np.isin(plan.keys(rank), places).all(), "all keys have a place"
        for part in plan.parts(rank):
            rows, keys = plan.rows(rank)[part.rows], plan.keys(rank)
            keys = np.intersect1d(keys, part.keys)
            if part.ready:
                keys = part.keys
                assert np.isin(keys, plan.owned_keys(rank)).all(), "what is ready is its own"
            assert len(np.unique(keys)) == len(keys)
            assert not len(keys) or (keys[0] >= part.lo and keys[-1] < part.hi <= sizes.keys)
            for number in range(chosen.groups):
                first, heads = plan.heads(rank, number)
                for head in range(first * group, (first + heads) * group):
                    count[head, rows[:, None], keys[None, :]] += 1
    assert (count[visible] == 1).all(), "a visible score is computed once"
    assert (count <= 1).all(), "no score is computed twice"


@settings(max_examples=min(settings().max_examples, 90) // 3)
@given(calls(), st.sampled_from(STRATEGIES))
def test_every_visible_score_is_computed_once(call: Call, strategy: Strategy) -> None:
    seen = visibility(call.mask, call.lengths)
    visible = call.visible()
    planner = Planner(seen, WIDTHS, call.ranks)
    plan = planner.plan(call.sizes)
    check(plan, visible)
    check_plan(plan, seen)
    assert planner.plan(call.sizes) is plan
    try:
        asked = planner.plan(call.sizes, strategy)
    except ValueError as refused:
        reason = str(refused)
    else:
        reason = ""
        assert asked.chosen.strategy == strategy
        check(asked, visible)
        check_plan(asked, seen)
    assert not reason or strategy in ("heads", "mixed")


@pytest.mark.parametrize("mask", ["kv_idx < prefix[b]", "kv_idx < width[h]", "kv_idx < prefix[b] + width[h]"])
def test_what_any_sequence_or_head_sees_is_needed(mask: str) -> None:
    """Each sees other keys, and the first one fewest."""
    tensors = {"prefix": np.array([5, 90, 20]), "width": np.array([3, 20, 75, 4])}
    sizes = CallSizes(batch=3, queries=96, keys=96, heads=HEADS, kv_heads=KV_HEADS, tensors=tensors)
    call = Call(mask=spell(mask), lengths={}, sizes=sizes, ranks=3)
    seen = visibility(call.mask)
    plan = Planner(seen, WIDTHS, 3).plan(sizes, "need")
    check(plan, call.visible())
    check_plan(plan, seen)


@pytest.mark.parametrize(("queries", "keys"), [(512, 1024), (1024, 512)])
def test_rows_that_wait_for_nothing_may_see_more_keys_than_they_are(queries: int, keys: int) -> None:
    scaled = "q_idx * 2 - kv_idx" if keys > queries else "q_pos - kv_idx"
    sizes = CallSizes(queries=queries, keys=keys, heads=HEADS, kv_heads=KV_HEADS)
    call = Call(mask=spell(f"abs({scaled}) < 60"), lengths={}, sizes=sizes, ranks=2)
    plan = Planner(visibility(call.mask), WIDTHS, 2).plan(sizes, "need")
    assert any(part.ready for rank in range(2) for part in plan.parts(rank))
    check(plan, call.visible())


@settings(max_examples=20)
@given(calls(queries=(16, 64, 96, 128, 90)))
def test_rows_in_slices(call: Call) -> None:
    seen, sizes, ranks = visibility(call.mask, call.lengths), call.sizes, range(call.ranks)
    planner = Planner(seen, WIDTHS, call.ranks)
    first = ((len(in_slices(rows, call.ranks)[0]), rows) for rows in (sizes.queries, sizes.keys))
    if any(own % 16 and own < rows for own, rows in first):
        with pytest.raises(ValueError, match="is no multiple of 16"):
            planner.plan(sizes, in_slices=True)
        return
    plan = planner.plan(sizes, in_slices=True)
    assert [plan.owned_rows(rank).tolist() for rank in ranks] == in_slices(sizes.queries, call.ranks)
    assert [plan.owned_keys(rank).tolist() for rank in ranks] == in_slices(sizes.keys, call.ranks)
    check(plan, call.visible())
    check_plan(plan, seen)


def in_slices(rows: int, ranks: int) -> list[list[int]]:
    """The rows of each rank, as DTensors are sharded."""
    own = max(-(-rows // ranks), 1)
    return [list(range(min(rank * own, rows), min((rank + 1) * own, rows))) for rank in range(ranks)]


def causal(n: int = 65536, **changes: Any) -> CallSizes:
    return CallSizes(queries=n, keys=n, heads=32, kv_heads=8, **changes)


def plan_of(mask: str, sizes: CallSizes, ranks: int = 4, strategy: Strategy | None = None) -> Plan:
    return Planner(visibility(spell(mask)), Widths(d=128, dv=128), ranks).plan(sizes, strategy)


def test_causal_gives_the_zigzag() -> None:
    plan = plan_of("kv_idx <= q_pos", causal(), strategy="need")
    pairs = plan.owner.reshape(-1, 8)
    assert all(np.array_equal(row[:4], row[:3:-1]) for row in pairs), "each eight chunks go there and back"
    assert plan.imbalance < 1.001
    assert np.array_equal(plan.owner_rows, np.full(4, 16384))


WINDOW = "q_pos - 4095 <= kv_idx and kv_idx <= q_pos"


def test_a_window_in_slices_moves_little() -> None:
    plan = make_plan(visibility(spell(WINDOW)), causal(), WIDTHS, 4, Rates(), "need", in_slices=True)
    minimum = least(plan, visibility(spell(WINDOW)))
    assert minimum.sum() == 3 * 4095 * 8 * 32 * 2
    assert minimum.sum() <= plan.bytes_moved.sum() <= 1.1 * minimum.sum()
    assert 1.03 < plan.imbalance < 1.035


def test_a_window_stays_in_runs_but_for_its_first_rows() -> None:
    """They see few keys, and near ones: dealt out, they make work even, and hardly more moves."""
    plan = plan_of(WINDOW, causal())
    assert (plan.chosen.strategy, plan.chosen.owners, plan.chunk) == ("need", "evened", 512)
    assert plan.owner[:8].tolist() == [3, 2, 1, 1, 0, 0, 0, 0]
    assert (np.diff(plan.owner[4:]) >= 0).all()
    assert plan.imbalance < 1.01
    minimum = least(plan, visibility(spell(WINDOW)))
    assert 3 * 4095 * 8 * 256 * 2 < minimum.sum() < 4 * 4096 * 8 * 256 * 2
    assert minimum.sum() <= plan.bytes_moved.sum() <= 1.01 * minimum.sum()


@given(
    st.integers(1, 6),
    st.integers(4, 12),
    st.lists(st.integers(0, 100), max_size=8),
    st.sampled_from(("first", "last", "within")),
)
def test_emptier_chunks_at_one_end_are_dealt_out(ranks: int, own: int, few: list[int], where: str) -> None:
    """So that all ranks have as many chunks, most in one run, and work is no less even than in runs."""
    work = [100.0] * (ranks * own)
    first = {"first": 0, "last": len(work) - len(few), "within": len(work) // 2}[where]
    light = sorted(few, reverse=where == "last")
    work[first : first + len(few)] = [float(x) for x in light][: len(work) - first]
    chunks = Chunks(16, np.full(len(work), 16), np.asarray(work), 0.1)
    owner = even_out(chunks, ranks)
    if owner is None:
        return
    assert where != "within" or max(light) > 98 or len(work) // 2 + len(few) >= len(work)
    assert np.bincount(owner, minlength=ranks).tolist() == [own] * ranks
    heavy = owner[np.asarray(work) == 100.0]
    assert (np.diff(heavy) >= 0).all()
    load, runs = (np.bincount(x, chunks.work, ranks) for x in (owner, contiguous(len(work), ranks)))
    assert load.max() <= runs.max() + 100.0


def test_documents_are_balanced() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.exponential(6000, 40), 256, 20000).astype(np.int64)
    doc = np.repeat(np.arange(40), lengths)[:65536][None]
    mask = "kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"
    plan = plan_of(mask, causal(tensors={"doc": doc}))
    assert plan.imbalance < 1.05
    assert plan.chosen.strategy == "need"
    assert plan.chosen.bytes < 0.6 * next(e.bytes for e in plan.estimates if e.strategy == "gather")


def test_more_ranks_than_chunks() -> None:
    plan = plan_of("kv_idx <= q_pos", CallSizes(queries=20, keys=20, heads=8, kv_heads=8), ranks=5)
    assert sum(len(plan.owned_rows(rank)) for rank in range(5)) == 20
    assert any(len(plan.owned_rows(rank)) == 0 for rank in range(5))


def test_a_strategy_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="3 K/V heads cannot be shared out to 4 ranks"):
        plan_of("kv_idx <= q_pos", CallSizes(queries=64, keys=64, heads=6, kv_heads=3), strategy="heads")


def test_plans_are_equal_and_differ_where_they_must() -> None:
    seen = visibility(spell("kv_idx <= q_pos"))
    first, second = (make_plan(seen, causal(4096), WIDTHS, 4, Rates()) for _ in range(2))
    assert first.hash == second.hash
    assert make_plan(seen, causal(4112), WIDTHS, 4, Rates()).hash != first.hash
    assert make_plan(seen, causal(4096), WIDTHS, 2, Rates()).hash != first.hash


PLAIN = CallSizes(batch=2, queries=40, keys=40, heads=2, kv_heads=2)
PACKED = replace(PLAIN, ends_q=np.array([0, 10, 40]), ends_k=np.array([0, 10, 40]))
DOCUMENTED = replace(PLAIN, tensors={"doc": np.array([[0, 1] * 20])}, dims={"W": 2})


@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        (PLAIN, replace(PLAIN, batch=3)),
        (PLAIN, replace(PLAIN, queries=39)),
        (PLAIN, replace(PLAIN, keys=39)),
        (PLAIN, replace(PLAIN, heads=4)),
        (PLAIN, replace(PLAIN, kv_heads=1)),
        (PACKED, replace(PACKED, ends_q=np.array([0, 20, 40]))),
        (PACKED, replace(PACKED, ends_k=np.array([0, 20, 40]))),
    ],
)
def test_what_a_plan_is_for_is_in_its_hash(sizes: CallSizes, other: CallSizes) -> None:
    """Also where the owners of rows and keys are the same."""
    seen = visibility(spell("kv_idx <= q_pos"))
    first, again, second = (
        make_plan(seen, x, WIDTHS, 1, Rates(), "need").hash for x in (sizes, sizes, other)
    )
    assert first == again != second


@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        (PLAIN, replace(PLAIN, batch=3)),
        (PLAIN, replace(PLAIN, heads=4)),
        (PACKED, replace(PACKED, ends_q=np.array([0, 20, 40]))),
        (PACKED, replace(PACKED, ends_k=np.array([0, 20, 40]))),
        (DOCUMENTED, replace(DOCUMENTED, tensors={"doc": np.array([[1, 0] * 20])})),
        (DOCUMENTED, replace(DOCUMENTED, tensors={"doc": np.array([[0, 1] * 20], np.int32)})),
        (DOCUMENTED, replace(DOCUMENTED, dims={"W": 3})),
    ],
)
def test_a_plan_is_found_again_by_all_that_it_depends_on(sizes: CallSizes, other: CallSizes) -> None:
    """Also where data alone change between calls."""
    planner = Planner(visibility(spell("kv_idx <= q_pos")), WIDTHS, 1)
    found, changed = planner.plan(sizes, "need"), planner.plan(other, "need")
    assert changed is not found
    assert planner.plan(deepcopy(sizes), "need") is found
    assert planner.plan(deepcopy(other), "need") is changed
    assert planner.plan(sizes, "gather") is not found


def test_heads_are_computed_against_windows_from_the_first_key() -> None:
    """From which dropout counts; rows that a rank owns begin at the first tile of keys that it needs."""
    seen = visibility(spell("kv_idx <= q_pos and kv_idx > q_pos - 16 and kv_idx >= 300"))
    sizes = CallSizes(queries=512, keys=512, heads=2, kv_heads=2)
    planner = Planner(seen, WIDTHS, 2)
    assert [planner.plan(sizes, "heads").window(rank) for rank in range(2)] == [(0, 512)] * 2
    assert {planner.plan(sizes, "need").window(rank)[0] % 128 for rank in range(2)} == {0}


DOCUMENTS = "kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"


def packed(n: int) -> CallSizes:
    lengths = np.random.default_rng(3).integers(n // 64, n // 8, 60)
    return causal(n, tensors={"doc": np.repeat(np.arange(60), lengths)[:n][None]})


def operations(mask: str, sizes: CallSizes, ranks: int) -> int:
    """Functions that a plan calls, of Python and of numpy: counted, and not in time."""
    seen, count = visibility(spell(mask)), 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    make_plan(seen, sizes, WIDTHS, ranks, Rates())
    before = sys.getprofile()
    sys.setprofile(called)
    try:
        make_plan(seen, sizes, WIDTHS, ranks, Rates())
    finally:
        sys.setprofile(before)
    return count


def test_planning_takes_few_operations() -> None:
    """64 chunks and 512 tiles of 65536 rows in some hundred calls, which longer sequences do not raise; where
    chunks are exchanged, in as many as a bounded number of looks takes.
    """
    size = chunk_rows(65536, 4)
    tiles = visibility(spell("kv_idx <= q_pos")).tiles(causal(), 128)
    chunks = group_into_chunks(tiles, 65536, 65536, size)
    assert (size, len(chunks.work), len(tiles.row)) == (1024, 64, 512)
    assert list(assignments(chunks, 4)) == ["contiguous", "longest first"]
    assert operations("kv_idx <= q_pos", causal(), 4) < 700
    for length, ranks in ((65536, 2), (65536, 4), (262144, 4), (65536, 8)):
        assert operations(DOCUMENTS, packed(length), ranks) < 1100 + 50 * 160
    few, many = (operations("kv_idx <= q_pos", causal(n), 4) for n in (16384, 262144))
    assert abs(many - few) < 100


@given(st.lists(st.integers(0, 1 << 30), max_size=70), st.integers(1, 9))
def test_chunks_go_to_whoever_has_least(work: list[int], ranks: int) -> None:
    chunks = Chunks(16, np.full(len(work), 16), np.asarray(work, np.float64), 0.5)
    assert longest_first(chunks, ranks).tolist() == plain_plan.longest_first(chunks, ranks)


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40), st.integers(1, 6))
def test_chunks_are_exchanged_until_no_two_make_work_more_even(work: list[int], ranks: int) -> None:
    """Of the ranks with most and least work; each has as many chunks as before."""
    chunks = Chunks(16, np.full(len(work), 16), np.asarray(work, np.float64), 0.5)
    start = contiguous(len(work), ranks)
    owner = exchange_chunks(chunks, start, ranks)
    assert np.bincount(owner, minlength=ranks).tolist() == np.bincount(start, minlength=ranks).tolist()
    before, load = (np.bincount(x, chunks.work, ranks) for x in (start, owner))
    assert load.max() <= before.max()
    if load.max() > (1 + EVEN) * sum(work) / ranks:
        give, take = (chunks.work[owner == rank] for rank in (load.argmax(), load.argmin()))
        apart = load.max() - load.min()
        gain = give[:, None] - take[None, :]
        assert (np.abs(apart - 2 * gain) >= apart).all()


def sizes_of(queries: int, keys: int, ends: tuple[int, ...] = (), **changes: Any) -> CallSizes:
    packed: dict[str, Any] = {}
    if ends:
        packed = {"batch": len(ends) - 1, "ends_q": np.array(ends), "ends_k": np.array(ends)}
    return CallSizes(queries=queries, keys=keys, heads=HEADS, kv_heads=KV_HEADS, **packed, **changes)


#: Mask, sizes, ranks and strategy of plans whose pages a person has read.
PAGES: Mapping[str, tuple[str, CallSizes, int, Strategy | None]] = {
    "causal": ("kv_idx <= q_pos", causal(8192), 4, None),
    "heads": ("kv_idx <= q_pos", causal(2048, batch=3), 2, "heads"),
    "mixed": ("kv_idx <= q_pos", causal(4096), 4, "mixed"),
    "gather": ("q_pos - 99 <= kv_idx and kv_idx <= q_pos", causal(2000), 3, "gather"),
    "few_rows": ("q_pos - 20 <= kv_idx and kv_idx <= q_pos", sizes_of(20, 400, batch=2), 3, None),
    "packed": ("kv_idx <= q_pos", sizes_of(700, 700, (0, 40, 300, 300, 700)), 2, None),
    "dilated": ("(q_pos - kv_idx) % 40 == 0 and kv_idx <= q_pos", sizes_of(300, 300), 2, None),
    "exchanged": (DOCUMENTS, packed(32768), 4, None),
    "uneven": ("kv_idx <= q_pos and (kv_idx > 9000 or q_pos < 500)", causal(12000), 5, "need"),
    "slow_links": ("q_pos - 900 <= kv_idx and kv_idx <= q_pos", causal(8192), 4, None),
}
#: Of links that all kernels wait for.
SLOW = Rates(link=1e9, latency=0.0, launch=0.0, part=0.0)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_plan(name: str, golden: Callable[[Path, str], None]) -> None:
    mask, sizes, ranks, strategy = PAGES[name]
    seen = visibility(spell(mask))
    rates = SLOW if name == "slow_links" else None
    plan = Planner(seen, Widths(d=128, dv=64), ranks, rates).plan(sizes, strategy)
    golden(GOLDEN / "ranks" / f"{name}.txt", as_text(plan, seen, ("made up",) * (name == "packed")) + "\n")


EXAMPLES: Mapping[str, str] = {
    **{name: SPECS[name] for name in ("documents", "packed", "prefix", "lengths", "window", "alibi")},
    "one_row": text("causal and doc[q_pos] == doc[kv_idx]", inputs=("doc: i32[N] is sorted",)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_of_an_example(name: str, golden: Callable[[Path, str], None]) -> None:
    """Contents are made up for what the mask reads."""
    program = resolve(parse(Source(f"{name}.attn", EXAMPLES[name])), prelude())
    sizes, remarks = example(program.attentions[0], {"M": 900, "B": 2, "Hkv": 2, "G": 3})
    seen = Visibility(program.attentions[0])
    page = as_text(make_plan(seen, sizes, Widths(d=16, dv=16), 2, Rates()), seen, remarks)
    golden(GOLDEN / "ranks" / f"example_{name}.txt", f"{page}\n")


def test_sizes_of_an_example_are_those_of_every_spec_and_its_own() -> None:
    program = resolve(parse(Source("distances.attn", SPECS["distances"])), prelude())
    assert sizes_known(program.attentions[0]) == ("B", "M", "N", "H", "Hkv", "G", "R")


def test_figures_are_those_of_the_page() -> None:
    mask, sizes, ranks, strategy = PAGES["mixed"]
    seen = visibility(spell(mask))
    plan = Planner(seen, Widths(d=128, dv=64), ranks).plan(sizes, strategy)
    figures = as_dict(plan, seen, ("made up",))
    assert (figures["ranks"], figures["queries"], figures["keys"]) == (4, 4096, 4096)
    assert (figures["heads"], figures["example"], figures["chunk"]) == ([32, 8], ["made up"], plan.chunk)
    assert (figures["chosen"], figures["stages"]) == ("mixed", plan.chosen.groups)
    assert figures["bytes"] == plan.bytes_moved.tolist()
    assert figures["least_bytes"] == least(plan, seen).tolist()
    chosen = next(row for row in figures["strategies"] if row["strategy"] == "mixed")
    assert chosen["total_s"] == plan.chosen.total == pytest.approx(chosen["compute_s"] + chosen["exposed_s"])
    assert chosen["bytes"] == sum(map(sum, figures["bytes"]))


@pytest.mark.parametrize("queries", [7, 9])
@pytest.mark.parametrize("ends_q", [None, (0, 3, 7), (0, 4, 7)])
@pytest.mark.parametrize("ends_k", [None, (0, 3, 7)])
def test_queries_and_keys_are_the_same_tokens_where_they_end_alike(
    queries: int, ends_q: tuple[int, ...] | None, ends_k: tuple[int, ...] | None
) -> None:
    q, k = (None if ends is None else np.array(ends) for ends in (ends_q, ends_k))
    sizes = CallSizes(queries=queries, keys=7, heads=1, kv_heads=1, batch=2, ends_q=q, ends_k=k)
    assert is_tied(sizes) == (queries == 7 and ends_q == ends_k)


def test_explain_says_what_was_chosen() -> None:
    seen = visibility(spell("kv_idx <= q_pos"))
    plan = make_plan(seen, causal(8192), Widths(d=128, dv=128), 4, Rates())
    page = as_text(plan, seen)
    assert f"chosen: {plan.chosen.strategy}" in page
    assert "imbalance 1.0" in page
    assert page.count("rank 3") >= 4
    figures = as_dict(plan, seen)
    assert figures["hash"] == plan.hash.hex()
    assert {row["strategy"] for row in figures["strategies"]} == set(STRATEGIES)


@given(st.integers(1, 6), st.integers(0, 70), st.integers(1, 64))
def test_slices_are_those_of_a_sharded_tensor(blocks: int, fewer: int, ranks: int) -> None:
    """torch.chunk's of whole blocks, of which the last ones are shorter, or none."""
    rows = max(BLOCK * blocks * ranks - fewer, 1)
    try:
        size = chunk_of_slices(rows, ranks)
    except ValueError:
        return
    whole = np.arange(rows) // size
    chunks = Chunks(size=size, rows=np.bincount(whole), work=np.ones(whole[-1] + 1), density=1.0)
    owner = slices(chunks, ranks)["slices"][whole]
    shares = torch.arange(rows).chunk(ranks)
    assert [np.flatnonzero(owner == rank).tolist() for rank in range(len(shares))] == [
        x.tolist() for x in shares
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.decode], ids=lambda cell: cell.name)
def test_measured_calls_are_shared_out_evenly(cell: RanksCell, ranks: int) -> None:
    """What `attnc bench --ranks` measures: equal work to 1 %, and no key moves to who does without it."""
    spec = spec_of(SPEC, cell.mask, "cuda.sm_90a")
    seen = Visibility(spec.variants[0].attention)
    sizes = sizes_of_cell(cell)
    plan = make_plan(seen, sizes, widths_of(seen), ranks, rates_of(spec.target))
    assert plan.imbalance <= 1.011
    assert np.ptp(plan.owner_rows) == 0
    if plan.chosen.strategy == "need":
        moved = int(least(plan, seen).sum())
        assert moved <= plan.bytes_moved.sum() == plan.chosen.bytes <= 1.005 * moved
