"""Flash-Decoding: packed heads and shares of the keys, against the reference and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.kernels.test_storage import paged, subject
from tests.verify.judging import assert_within_bound, every_fill, for_every_target, transposed

MASKS = ("true", "causal", "window(20, 3)", "chunk(16)", "q_pos + h >= kv_idx", "kv_idx % 3 != 1 and causal")
DIMS = {"B": 2, "M": 3, "N": 150, "Hkv": 2, "G": 3}
TARGET = "triton"
every_target = for_every_target(__name__)


def schedule(splits: str, *, pack: str = "gqa", kv: int = 16, softmax: str = "online") -> str:
    if TARGET != "triton":
        pack, kv = f"{pack}, warp_split = kv", 4 * kv  # each warp has keys of its own
    return f"""schedule a for {TARGET} {{
  loops = [kv], pack = {pack}, tile.q = 16, tile.kv = {kv}, warps = 4, stages = 2
  split.kv = {splits}, softmax = {softmax}
}}"""


def decode(splits: str, mask: str = "causal", pack: str = "gqa") -> Subject:
    return paged(16, mask=mask, schedule=schedule(splits, pack=pack))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("mask", "splits"), some_by_day(MASKS, ("1", "5", "auto", "fixed(64)"), of=4))
def test_every_mask_and_split(mask: str, splits: str) -> None:
    made = decode(splits, mask)
    for dims in ({}, {"M": 1}, {"M": 9, "G": 2}, {"N": 1}):
        assert_within_bound(made, Case(dims={**DIMS, **dims}, seed=len(mask)), fills=("nan", "large"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("page", [1, 5, 8, 24, 64])
def test_every_page_size(page: int) -> None:
    made = paged(page, schedule=schedule("3"))
    for dims in (DIMS, {**DIMS, "M": 1, "N": 200}):
        assert_within_bound(made, Case(dims=dims, seed=page), fills=("nan", "large"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("page", [1, 7, 16, 48])
def test_pages_give_the_bits_of_a_tensor(page: int) -> None:
    """Whatever their size and order, and although splits are joined."""
    torch.manual_seed(page)
    columns = 192 // page
    q, (k, v) = torch.randn(2, 1, 6, 16).half(), torch.randn(2, 2, columns * page, 2, 16).half()
    order = torch.randperm(2 * columns)
    pools = [torch.empty_like(x).view(-1, page, 2, 16) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[order] = x.view(-1, page, 2, 16)
    table, length = order.int().view(2, columns), torch.tensor([180, 5], dtype=torch.int32)
    dense = subject(
        "[B, M, Hkv * G, 16]",
        "input k, v: f16[B, N, Hkv, 16]",
        "input kv_len: i32[B]\n  length N = kv_len[b]",
        "[B, M, Hkv * G, 16]",
        schedule=schedule("4"),
    ).module.a(q, k, v, length)
    found = paged(page, schedule=schedule("4")).module.a(q, *pools, table, length)
    for one, other in zip(found, dense, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("splits", "kind"), [("auto", (3, 0)), ("fixed(64)", (0, 16)), ("2", (2, 0))])
def test_what_is_verified_has_splits(splits: str, kind: tuple[int, int]) -> None:
    """Small cases would suit one program, and nobody would look at the kernel that joins several."""
    if TARGET != "triton" and splits != "auto":
        pytest.skip("the same for every target")
    kinds = [(config.splits, getattr(config, "split_size", 0)) for config in decode(splits).configs]
    assert kind in kinds
    assert {(2, 0), (16, 0), (17, 0), (65, 0)} <= set(kinds)
    assert not any(count and size for count, size in kinds)


def test_the_size_of_shares_decides_how_many_there_are() -> None:
    """Two splits of 64 keys would lose all others."""
    made = decode("fixed(64)", "true")
    first = made.module.CONFIGS[0]
    inputs = build(made.variant.attention, Case(dims=DIMS, seed=1), device=made.device).inputs.values()
    results = [made.function(*inputs, config=config) for config in (first, first._replace(splits=2))]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("dims", "pack"),
    some_by_day([{"G": 1}, {"G": 8, "M": 1}, {"G": 5, "M": 7}, {"N": 0}, {"B": 0}], ["gqa", "none"], of=2),
)
def test_groups(pack: str, dims: dict[str, int]) -> None:
    made = decode("3", pack=pack)
    for layouts in ({}, transposed(made.variant.attention)):
        case = Case(dims={**DIMS, **dims}, seed=7, layouts=layouts)
        assert_within_bound(made, case, fills=every_fill())


def test_more_shares_than_tiles() -> None:
    """Most splits are empty; the combine kernel reads nothing of them."""
    assert_within_bound(decode("100"), Case(dims={**DIMS, "N": 40}, seed=2), fills=every_fill())


def test_many_more_queries_than_keys() -> None:
    """Shares of no keys at all: the table has no page for them, and none before its first."""
    assert_within_bound(
        decode("4"), Case(dims={"B": 2, "M": 400, "N": 3, "Hkv": 1, "G": 1}, seed=1), fills=("nan",)
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("splits", ["1", "4"])
def test_the_sink_counts_once(splits: str) -> None:
    made = subject(
        "[B, M, Hkv * G, 16]",
        "input k, v: f16[B, N, Hkv, 16]",
        "input sink: f32[Hkv * G]",
        "[B, M, Hkv * G, 16]",
        mask="window(30, 0)",
        softmax="(sink = sink[h])",
        schedule=schedule(splits),
    )
    for seed in range(2):
        assert_within_bound(made, Case(dims=DIMS, seed=seed), fills=("nan", "large"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("heads", ["H", "1"])
def test_one_head_for_each_and_one_for_all(heads: str) -> None:
    queries = "H" if heads == "H" else "G"
    made = subject(
        f"[B, M, {queries}, 16]",
        f"input k, v: f16[B, N, {heads}, 16]",
        "",
        f"[B, M, {queries}, 16]",
        schedule=schedule("3"),
    )
    assert_within_bound(
        made, Case(dims={"B": 2, "M": 5, "N": 70, queries: 3}, seed=1), fills=("nan", "large")
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("splits", ["1", "3"])
def test_values_that_are_part_of_the_keys(splits: str) -> None:
    """Their tile is the first part of k's: it is loaded once."""
    made = subject(
        "[B, M, G, 48]",
        "input k: f16[B, N, 1, 48] via paged(table, page = 16)\n  input v: f16[B, N, 1, 32] via prefix(k)",
        "input table: i32[B, P]\n  input kv_len: i32[B]\n  length N = kv_len[b]",
        "[B, M, G, 32]",
        schedule=schedule(splits),
    )
    assert_within_bound(made, Case(dims={"B": 2, "M": 2, "N": 50, "G": 11}, seed=3), fills=every_fill())


def test_head_dimensions_that_are_no_power_of_two() -> None:
    made = subject(
        "[B, M, Hkv * G, 40]",
        "input k: f16[B, N, Hkv, 40]\n  input v: f16[B, N, Hkv, 24]",
        "",
        "[B, M, Hkv * G, 24]",
        schedule=schedule("3"),
    )
    assert_within_bound(made, Case(dims=DIMS, seed=3), fills=every_fill())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("splits", ["1", "2"])
def test_rows_past_a_length_are_empty(splits: str) -> None:
    made = subject(
        "[B, M, Hkv * G, 16]",
        "input k, v: f16[B, N, Hkv, 16]",
        "input q_len: i32[B]\n  length M = q_len[b]",
        "[B, M, Hkv * G, 16]",
        softmax="(sink = 0.5)",
        schedule=schedule(splits),
    )
    for seed in range(3):
        assert_within_bound(made, Case(dims={**DIMS, "M": 11}, seed=seed))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("storage", ["", " via paged(block_table, page = 16)"])
@pytest.mark.parametrize("splits", ["1", "auto"])
def test_tiles_past_a_length_look_at_no_key(splits: str, storage: str) -> None:
    """Whole tiles of rows that a length cuts off: neither a key nor an entry of the table is theirs."""
    table = "\n  input block_table: i32[B, P]" if storage else ""
    made = subject(
        "[B, M, H, 16]",
        f"input k, v: f16[B, N, H, 16]{storage}{table}",
        "input q_len, kv_len: i32[B]\n  length M = q_len[b]\n  length N = kv_len[b]",
        "[B, M, H, 16]",
        schedule=schedule(splits),
    )
    for dims in ({"M": 150, "N": 16}, {"M": 97, "N": 33}):
        assert_within_bound(
            made,
            Case(dims={"B": 2, "H": 2, **dims, "P": -(-dims["N"] // 16)}, seed=1),
            fills=("nan", "large"),
        )


def test_bits_do_not_depend_on_the_batch() -> None:
    """A fixed number of splits cuts a sequence in the same places, whatever is beside it."""
    torch.manual_seed(0)
    made = decode("4").module
    q, pool = torch.randn(3, 1, 4, 16).half(), torch.randn(2, 40, 16, 2, 16).half()
    table = torch.randperm(40)[:30].reshape(3, 10).to(torch.int32)
    length = torch.tensor([150, 3, 77], dtype=torch.int32)
    check_alone(made, q, pool, table, length)


def test_bits_of_shares_of_a_fixed_size_depend_on_the_sequence_alone() -> None:
    """Neither on what is beside it nor on how much room the cache has."""
    torch.manual_seed(0)
    made = decode("fixed(64)").module
    q, pool = torch.randn(3, 1, 4, 16).half(), torch.randn(2, 40, 16, 2, 16).half()
    table = torch.randperm(40)[:30].reshape(3, 10).to(torch.int32)
    length = torch.tensor([150, 3, 77], dtype=torch.int32)
    together = made.a(q, *pool, table, length)
    roomier = made.a(q, *pool, table.repeat(1, 3), length)
    for one, other in zip(together, roomier, strict=True):
        assert torch.equal(one, other)
    check_alone(made, q, pool, table, length)


def check_alone(
    made: Any, q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, length: torch.Tensor
) -> None:
    """Each sequence by itself gives the bits that it has in the batch."""
    together = made.a(q, *pool, table, length)
    for b in range(len(q)):
        alone = made.a(q[b : b + 1], *pool, table[b : b + 1], length[b : b + 1])
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[b])


def test_a_prepared_call_serves_other_values_and_only_alike_arguments() -> None:
    torch.manual_seed(0)
    made = decode("2").module
    q, pool = torch.randn(1, 1, 4, 16).half(), torch.randn(2, 8, 16, 2, 16).half()
    table, length = torch.arange(4, dtype=torch.int32)[None], torch.tensor([50], dtype=torch.int32)
    first = made.a(q, *pool, table, length)
    assert len(made.CALL.prepared) == 1
    shorter = made.a(q, *pool, table, torch.tensor([20], dtype=torch.int32))
    assert len(made.CALL.prepared) == 1
    assert not torch.equal(first[0], shorter[0])
    apart = torch.zeros(1, 1, 4, 32).half()
    apart[..., :16] = q
    out = (torch.empty(1, 1, 4, 32).half()[..., :16], torch.empty(1, 1, 4))
    again = made.a(apart[..., :16], *pool, table, length, out=out)
    assert len(made.CALL.prepared) == 2
    assert again[0].data_ptr() == out[0].data_ptr()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    with pytest.raises(TypeError, match="expected dtype"):
        made.a(q, *pool, table, length.long())
    with pytest.raises(TypeError, match="expected a tensor"):
        made.a(q, *pool, table, 50)
    for wrong in (out[0], (), 5):
        with pytest.raises(TypeError, match="out: expected a tuple of 2 tensors"):
            made.a(q, *pool, table, length, out=wrong)
    assert len(made.CALL.prepared) == 2


@pytest.mark.one_in(6)
@pytest.mark.parametrize("softmax", ["online", "unified_max(phi = 0, bounds = [-4, 4], fallback = online)"])
@pytest.mark.parametrize("splits", ["1", "3"])
def test_tiles_of_many_pages(splits: str, softmax: str) -> None:
    """Rows of a tile after the last visible key are read too: their pages must be the right ones."""
    softmax = softmax if splits == "1" else "online"
    made = paged(16, schedule=schedule(splits, kv=64, softmax=softmax))
    for dims in ({"M": 21, "N": 21}, {"M": 33, "N": 17}, {"M": 7, "N": 150}):
        assert_within_bound(made, Case(dims={**DIMS, **dims, "B": 1}, seed=1), fills=("nan", "large"))


def test_more_shares_than_a_grid_has_are_refused() -> None:
    """The kernel is not asked: a table of 65536 pages, and none of them."""
    if TARGET != "triton":
        pytest.skip("blocks lie along the first axis, which has 2^31 - 1")
    made = decode("fixed(16)").module.a
    q = torch.ones(1, 1, 2, 16, dtype=torch.float16)
    k = torch.ones(1, 16, 1, 16, dtype=torch.float16)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 65536)
    lengths = torch.ones(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match="config: expected at most 65535 splits, of 17 keys at least, got 65536"
    ):
        made(q, k, k, table, lengths)
