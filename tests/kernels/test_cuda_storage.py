"""Pages, packed sequences and lengths in CUDA kernels, run thread by thread on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.subject import Subject
from tests.kernels import test_storage as storage
from tests.targets import needs_gxx
from tests.verify import judging

pytestmark = [
    pytest.mark.slow,
    needs_gxx,
]

KNOBS = "tile.q = 32, tile.kv = 32, warps = 2, stages = 2"
DIMS = storage.DIMS


def scheduled(knobs: str = "") -> str:
    return f"schedule a for cuda.sm_80 {{ {KNOBS} {knobs} }}"


subject = partial(storage.subject, schedule=scheduled())
paged = partial(storage.paged, schedule=scheduled())
assert_within_bound = partial(judging.assert_within_bound, fills=judging.every_fill())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", [1, 3, 16, 48, 256])
def test_every_page_size(page: int) -> None:
    assert_within_bound(paged(page), Case(dims=DIMS, seed=page))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["[B, Hkv, N, 16]", "[N, B, Hkv, 16]"])
def test_pages_of_any_layout(layout: str) -> None:
    made = paged(16, layout)
    for layouts in ({}, judging.transposed(made.variant.attention)):
        assert_within_bound(made, Case(dims=DIMS, seed=5, layouts=layouts))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mask", ["true", "window(20, 3)", "chunk(16)", "q_pos + h >= kv_idx"])
def test_masks_over_pages(mask: str) -> None:
    made = paged(16, mask=mask)
    for dims in ({"M": 1}, {"M": 17}, {"N": 0}, {"N": 1, "M": 2}):
        assert_within_bound(made, Case(dims={**DIMS, **dims}, seed=1))


def packed(shared: bool, knobs: str = "", **named: str) -> Subject:
    return storage.packed(shared, schedule=scheduled(knobs), **named)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("shared", [False, True], ids=["two", "self"])
@pytest.mark.parametrize("knobs", ["", ", order = longest_first", ", persistent = true", ", warp_split = kv"])
def test_packed_sequences(shared: bool, knobs: str) -> None:
    made = packed(shared, knobs)
    dims = {"B": 3, "M": 40, "N": 37, "Hkv": 1, "G": 2}
    dims = {name: size for name, size in dims.items() if name != "N" or not shared}
    for seed in range(4):
        assert_within_bound(made, Case(dims=dims, seed=seed))


def test_many_packed_sequences() -> None:
    assert_within_bound(packed(False), Case(dims={"B": 150, "M": 3, "N": 5, "Hkv": 1, "G": 1}, seed=3))


def test_rows_behind_the_last_sequence_have_no_sink() -> None:
    made = packed(False, softmax="(sink = sink[h])", extras="input sink: f32[Hkv * G]")
    for seed in range(4):
        assert_within_bound(made, Case(dims={"B": 2, "M": 5, "N": 9, "Hkv": 1, "G": 2}, seed=seed))


def test_no_sequences() -> None:
    q, k = torch.ones(3, 2, 16, dtype=torch.float16), torch.ones(0, 1, 16, dtype=torch.float16)
    none = torch.zeros(1, dtype=torch.int32)
    o, lse = packed(False).module.a(q, k, k, none, none)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_packed_equals_one_by_one_bitwise() -> None:
    torch.manual_seed(1)
    made = packed(False).module.a
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 5, 5, 70], [0, 40, 44, 121]))
    q, k, v = (torch.randn(n, 2, 16).half() for n in (70, 121, 121))
    together = made(q, k, v, cu_q, cu_k)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        ends = (torch.tensor([0, part.stop - part.start], dtype=torch.int32) for part in (rows, keys))
        alone = made(q[rows], k[keys], v[keys], *ends)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other[rows])


def test_values_that_are_a_prefix_of_the_keys() -> None:
    """Their tile is the first part of k's: it is copied once."""
    made = subject(
        "[B, M, G, 48]",
        "input k: f16[B, N, 1, 48] via paged(table, page = 16)\n  input v: f16[B, N, 1, 32] via prefix(k)",
        "input table: i32[B, P]\n  input kv_len: i32[B]\n  length N = kv_len[b]",
        "[B, M, G, 32]",
    )
    for seed in (0, 1):
        assert_within_bound(made, Case(dims={"B": 2, "M": 2, "N": 90, "G": 3}, seed=seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "knobs",
    ["", ", warp_split = kv", ", loops = [kv, q], softmax = online(rescale = every_step)"],
    ids=["split-Q", "split-K", "outside in"],
)
def test_rows_past_a_length_are_empty(knobs: str) -> None:
    made = storage.subject(
        "[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "input q_len, kv_len: i32[B]\n  length M = q_len[b]\n  length N = kv_len[b]",
        "[B, M, H, 16]",
        softmax="(sink = 0.5)",
        schedule=scheduled(knobs),
    )
    for seed in range(3):
        assert_within_bound(made, Case(dims={"B": 2, "M": 40, "N": 40, "H": 1}, seed=seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", [5, 64])
def test_pages_equal_contiguous_rows_bitwise(page: int) -> None:
    """Whatever the pages' order: the plan is the same, so every rounding is."""
    torch.manual_seed(page)
    n, pages = 100, -(-100 // page)
    k, v = torch.randn(2, 2, n, 2, 16).half()
    q = torch.randn(2, 3, 4, 16).half()
    dense = subject("[B, M, Hkv * G, 16]", "input k, v: f16[B, N, Hkv, 16]", "", "[B, M, Hkv * G, 16]")
    expected = dense.module.a(q, k, v)
    for _ in range(2):
        order = torch.randperm(2 * pages).reshape(2, pages).to(torch.int32)
        pools = torch.full((2, 2 * pages, page, 2, 16), torch.nan).half()
        for b in range(2):
            for column in range(pages):
                for pool, rows in zip(pools, (k, v), strict=True):
                    part = rows[b, column * page : (column + 1) * page]
                    pool[order[b, column], : len(part)] = part
        found = paged(page).module.a(q, *pools, order, torch.full((2,), n, dtype=torch.int32))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mask", ["causal", "window(20, 3)"])
@pytest.mark.parametrize("stages", [1, 3])
def test_two_passes(mask: str, stages: int) -> None:
    schedule = (
        f"schedule a for cuda.sm_80 {{ tile.q = 32, warps = 2, stages = {stages}, softmax = two_pass }}"
    )
    made = paged(16, mask=mask, schedule=schedule)
    for seed, dims in enumerate(({}, {"N": 200, "M": 70}, {"N": 0})):
        assert_within_bound(
            made, Case(dims={**DIMS, **dims}, seed=seed, logits="spike" if seed else "random")
        )


def test_chunks_of_a_prompt_equal_all_of_it() -> None:
    torch.manual_seed(0)
    made = packed(True).module.a, paged(16).module.a
    q, pools = torch.randn(90, 2, 16).half(), torch.randn(2, 8, 16, 2, 16).half()
    table = torch.randperm(8)[:6].to(torch.int32)[None]
    k, v = (pool[table[0].long()].reshape(96, 2, 16)[:90].contiguous() for pool in pools)
    whole, _ = made[0](q, k, v, torch.tensor([0, 90], dtype=torch.int32))
    for first, last in ((0, 33), (33, 34), (34, 90)):
        chunk, _ = made[1](q[None, first:last], *pools, table, torch.tensor([last], dtype=torch.int32))
        torch.testing.assert_close(chunk[0], whole[first:last], atol=2e-3, rtol=2e-3)
