"""The lists of blocks of a BlockMask: what they leave out, when they are looked at, and what that costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from attnc.flex import blocks, family_of, flex_attention
from attnc.flex.blocks import blocks_of, restrict
from attnc.flex.dense import rows_at_once, values
from attnc.flex.trace import trace
from tests.flex.mods import causal
from tests.flex.oracle import torch_flex

S, SIZE = 40, 16


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (made(2, 2, S, 16, seed=seed) for seed in range(3))


def lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = table.sum(-1).int()
    return counts, torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()


def listed(
    table: torch.Tensor, full: torch.Tensor | None = None, mod: Any = causal, size: int = SIZE
) -> BlockMask:
    from_lists: Callable[..., BlockMask] = BlockMask.from_kv_blocks
    others = () if full is None else lists(full)
    return from_lists(*lists(table), *others, BLOCK_SIZE=size, mask_mod=mod, seq_lengths=(S, S))


def tables(*outer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that are listed, and others that are full."""
    drawn = torch.rand((*outer, 3, 3), generator=torch.Generator().manual_seed(3))
    return drawn < 0.5, drawn > 0.7


def assert_attends(found: torch.Tensor, mask: Any) -> None:
    torch.testing.assert_close(found.double(), torch_flex(Q, K, V, None, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("outer", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_mask_mod_counts_in_listed_blocks_alone_and_not_in_full_ones(outer: tuple[int, int]) -> None:
    partial, full = tables(*outer)

    def kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b * (outer[0] > 1), h * (outer[1] > 1), q // SIZE, kv // SIZE)
        return (partial[at] & (q >= kv)) | full[at]

    assert_attends(flex_attention(Q, K, V, block_mask=listed(partial, full)), kept)
    full = torch.zeros_like(full)
    assert_attends(flex_attention(Q, K, V, block_mask=listed(partial)), kept)


@pytest.mark.parametrize("size", [8, 16, 24])
@pytest.mark.parametrize("mod", [causal, noop_mask, lambda b, h, q, kv: (q + h) // 16 == kv // 16])
def test_any_lists_keep_what_they_say(mod: Any, size: int) -> None:
    """Full blocks that the mask_mod keeps or not, and lists of all that it keeps or not, pair by pair."""
    count, sizes = -(-S // size), {"B": 2, "H": 2, "M": S, "N": S}
    at = torch.meshgrid(*map(torch.arange, sizes.values()), indexing="ij")
    holds = mod(*at).expand(2, 2, S, S)
    block = (slice(None), slice(None), at[2] // size, at[3] // size)
    of_pair = torch.zeros(2, 2, count, count, dtype=torch.int32)
    some, hidden = (
        of_pair.index_put((at[0], at[1], *block[2:]), x.int(), accumulate=True) > 0 for x in (holds, ~holds)
    )
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        listed_at, full = (torch.rand(2, 2, count, count, generator=draw) < 0.5 for _ in range(2))
        full &= ~(hidden & (seed % 2 == 1))
        listed_at |= some & ~full & (seed % 4 > 1)
        traced = trace(None, mod, scale=1.0, sizes=sizes, device=torch.device("cpu"), gradients=False)
        mask = listed(listed_at, full if seed < 6 else None, mod, size)
        found = restrict(traced, blocks_of(mask))
        ((_, _, indices),) = rows_at_once(found.tape, 4)
        whole = full[at[0], at[1], *block[2:]] & (seed < 6)
        expected = (listed_at[at[0], at[1], *block[2:]] & holds) | whole
        kept = values(found.tape, found.mask, indices)
        assert torch.equal(kept.expand_as(expected), expected), seed
        if found.listed is not None:
            assert (values(found.tape, found.listed, indices) | ~expected).all()


def test_what_lies_behind_a_count_may_be_anything() -> None:
    partial, _ = tables(1, 1)
    counts, indices = lists(partial)
    wild = torch.where(torch.arange(3) < counts[..., None], indices, -7)
    order = [1, 0, 2]  # the first two of a row may come in any order
    swapped = torch.where(counts[..., None] >= 2, wild[..., order], wild)
    masks = [
        BlockMask.from_kv_blocks(
            counts, x, BLOCK_SIZE=SIZE, mask_mod=causal, seq_lengths=(S, S), compute_q_blocks=False
        )
        for x in (indices, wild, swapped)
    ]
    first, *others = (flex_attention(Q, K, V, block_mask=mask) for mask in masks)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("nothing", [-1, 3, 2**31 - 1])
def test_indices_of_no_block_list_nothing(nothing: int) -> None:
    partial, _ = tables(1, 1)
    counts, indices = lists(partial)
    longer = torch.cat([torch.full_like(indices[..., :1], nothing), indices], -1)[..., :3]
    is_short = counts[..., None] < 3  # a row that lists all blocks has no room for one more
    mask = BlockMask.from_kv_blocks(
        torch.where(is_short[..., 0], counts + 1, counts),
        torch.where(is_short, longer, indices),
        BLOCK_SIZE=SIZE,
        mask_mod=causal,
        seq_lengths=(S, S),
        compute_q_blocks=False,
    )
    expected = flex_attention(Q, K, V, block_mask=listed(partial))
    assert torch.equal(flex_attention(Q, K, V, block_mask=mask), expected)


def test_a_mask_of_create_block_mask_is_its_mask_mod() -> None:
    document = torch.arange(S) // 9

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (document[q] == document[kv]) & (q >= kv) & (h + b >= 0)

    for size in (8, (16, 8), 128):
        block_mask = create_block_mask(mask, 2, 2, S, S, device="cpu", BLOCK_SIZE=size)
        spec = family_of(Q, K, V, block_mask=block_mask).spec
        assert spec == family_of(Q, K, V, mask_mod=mask).spec
    noop = create_block_mask(noop_mask, None, None, S, S, device="cpu")
    assert "mask =" not in family_of(Q, K, V, block_mask=noop).spec


def test_lists_that_leave_keys_out_stand_beside_the_mask() -> None:
    partial, full = tables(1, 1)
    full[..., 0, 2] = True  # where the mask_mod keeps nothing
    assert "mask = listed(blocks[q_idx // 16], keys = 16) and q_idx >= kv_idx" in str(
        family_of(Q, K, V, block_mask=listed(partial)).spec
    )
    assert "input full: bool" in str(family_of(Q, K, V, block_mask=listed(partial, full)).spec)
    whole = listed(partial, full, noop_mask)
    assert "mask = listed(blocks[q_idx // 16], keys = 16)" in str(family_of(Q, K, V, block_mask=whole).spec)


def test_blocks_that_no_tile_has_are_a_table_beside_the_mask() -> None:
    partial = torch.eye(2).bool()[None, None]
    block_mask = listed(partial, size=20)
    assert "mask = q_idx >= kv_idx and partial[q_idx // 20, kv_idx // 20]" in str(
        family_of(Q, K, V, block_mask=block_mask).spec
    )
    assert_attends(
        flex_attention(Q, K, V, block_mask=block_mask),
        lambda b, h, q, kv: partial[0 * b, 0 * h, q // 20, kv // 20] & (q >= kv),
    )


def test_a_mask_from_data_visits_listed_blocks_alone() -> None:
    """Its mask_mod says all that the lists say, but not which tiles are empty."""
    chosen = torch.rand((2, S, S), generator=torch.Generator().manual_seed(5)) < 0.02

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return chosen[h, q, kv]

    block_mask = create_block_mask(mask, None, 2, S, S, device="cpu", BLOCK_SIZE=SIZE)
    spec = str(family_of(Q, K, V, block_mask=block_mask).spec)
    assert "mask = listed(blocks[h, q_idx // 16], keys = 16) and chosen[h, q_idx, kv_idx]" in spec
    assert_attends(flex_attention(Q, K, V, block_mask=block_mask), mask)


def test_a_capture_that_is_called_listed_is_another_name() -> None:
    listed_of = torch.rand((S, S), generator=torch.Generator().manual_seed(5)) < 0.1

    def mask(b: Any, h: Any, q: Any, kv: Any, listed: Any = listed_of) -> Any:
        return listed[q, kv]

    def closed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask(b, h, q, kv)

    block_mask = create_block_mask(closed, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    assert_attends(flex_attention(Q, K, V, block_mask=block_mask), closed)


def test_full_blocks_that_the_mask_mod_keeps_are_no_second_table() -> None:
    full = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]]).bool()[None, None]
    spec = str(family_of(Q, K, V, block_mask=listed(torch.zeros_like(full), full)).spec)
    assert "listed" in spec
    assert "full" not in spec


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    original = blocks._compare_tables

    def counted(*given: Any) -> Any:
        seen.append(1)
        return original(*given)

    monkeypatch.setattr(blocks, "_compare_tables", counted)
    return seen


def test_lists_are_looked_at_once_while_they_stay_as_they_are(looks: list[int]) -> None:
    limit = torch.tensor(30)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (kv < limit)

    block_mask = create_block_mask(mask, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    for _ in range(3):
        assert_attends(flex_attention(Q, K, V, block_mask=block_mask), mask)
    assert len(looks) == 1
    limit.fill_(40)  # which keeps more than the lists
    assert_attends(
        flex_attention(Q, K, V, block_mask=block_mask),
        lambda b, h, q, kv: mask(b, h, q, kv) & (kv // SIZE < 2),
    )
    assert len(looks) == 2
    block_mask.kv_num_blocks[..., 0] = 0
    assert block_mask.full_kv_num_blocks is not None
    block_mask.full_kv_num_blocks[..., 0] = 0
    assert_attends(
        flex_attention(Q, K, V, block_mask=block_mask),
        lambda b, h, q, kv: mask(b, h, q, kv) & (kv // SIZE < 2) & (q >= SIZE),
    )
    assert len(looks) == 3


def test_lists_have_as_many_places_as_the_longest_one_needs() -> None:
    table = torch.zeros(1, 1, 40, 40, dtype=torch.bool)
    table[..., ::4] = True
    table[:, :, 3] = False
    longest = blocks._list(table)
    assert longest.shape[-1] == 40
    assert torch.equal(blocks._shorten(longest, 10), longest[..., :16])
    assert blocks._shorten(longest, 0).shape[-1] == 8
    assert blocks._shorten(longest, 40).shape[-1] == 40
    assert blocks._shorten(longest[..., :3], 2).shape[-1] == 3


def test_lists_that_cannot_be_looked_at_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured graph."""
    monkeypatch.setattr(blocks, "remember", lambda tensors, what, look, unseen: unseen)
    partial, full = tables(2, 1)
    block_mask = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    assert_attends(flex_attention(Q, K, V, block_mask=block_mask), causal)

    def kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b, 0 * h, q // SIZE, kv // SIZE)
        return (partial[at] & (q >= kv)) | full[at]

    assert_attends(flex_attention(Q, K, V, block_mask=listed(partial, full)), kept)
    whole = listed(partial, full, noop_mask)
    assert_attends(
        flex_attention(Q, K, V, block_mask=whole),
        lambda b, h, q, kv: (partial | full)[b, 0 * h, q // SIZE, kv // SIZE],
    )


def test_lists_change_without_another_graph() -> None:
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> Any:
        return flex_attention(q, k, v, block_mask=block_mask)

    inside = torch.compile(attend, backend=counter, fullgraph=True)
    partial, full = tables(1, 2)
    for mask in (listed(partial, full), listed(full, partial)):
        assert torch.equal(inside(Q, K, V, mask), flex_attention(Q, K, V, block_mask=mask))
    assert counter.frame_count == 1


def test_blocks_of_a_table_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnc.api.compile._SAID", set())
    partial = torch.eye(2).bool()[None, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flex_attention(Q, K, V, block_mask=listed(partial, mod=noop_mask, size=20))
    assert not caught


def test_pages_of_torch() -> None:
    """Its page tables are a mask_mod, a score_mod and lists of physical blocks."""
    N, size = 32, 16
    paged = PagedAttention(8, size, 2, device="cpu")
    for b in (1, 0):
        paged.reserve(torch.tensor(b), torch.tensor(N))
    k, v = made(2, 2, N, 16, seed=4), made(2, 2, N, 16, seed=5)
    caches = torch.zeros(2, 1, 2, 8 * size, 16)
    positions = torch.arange(N).expand(2, N)
    paged.assign(torch.arange(2), positions, k, v, *caches)
    logical = create_block_mask(causal, 2, 1, S, N, device="cpu", BLOCK_SIZE=size)
    lengths = torch.full((2,), N)
    physical = paged.convert_logical_block_mask(logical, kv_len=lengths)

    def sloped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - (q - kv) * 0.1

    score_mod = paged.get_score_mod(sloped, kv_len=lengths)
    found = flex_attention(Q, caches[0], caches[1], score_mod, physical)
    expected = torch_flex(Q, k, v, sloped, causal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_lengths_of_a_mask_are_those_of_the_call() -> None:
    """But for one without blocks, which says nothing of lengths; sequences and heads may be one."""
    q, k = torch.zeros(2, 3, 40, 4), torch.zeros(2, 3, 70, 4)
    for B, H, M, N in ((2, 3, 40, 70), (1, 3, 40, 70), (2, 1, 40, 70), (1, 1, 40, 70)):
        blocks.check_blocks(create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=16), q, k)
    for (B, H, M, N), said in {
        (1, 1, 41, 70): "lengths", (1, 1, 40, 71): "lengths", (1, 1, 70, 40): "lengths",
        (3, 1, 40, 70): "expected sequences 1 or 2", (1, 2, 40, 70): "expected heads 1 or 3",
    }.items():  # fmt: skip
        for size in ((16, 16), (1 << 30, 16), (16, 1 << 30)):
            mask: Any = create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=16)
            mask.BLOCK_SIZE = size
            with pytest.raises(ValueError, match=said):
                blocks.check_blocks(mask, q, k)
    whole: Any = create_block_mask(causal, 1, 1, 41, 71, device="cpu", BLOCK_SIZE=16)
    whole.BLOCK_SIZE = (1 << 30, 1 << 30)
    blocks.check_blocks(whole, q, k)


@pytest.mark.parametrize("row", [2, slice(2, 3), torch.tensor([2]), torch.tensor(2)], ids=str)
def test_a_row_of_a_mask_serves_a_decoded_token(row: Any) -> None:
    """However it is indexed: a tensor of no axes takes the axis of rows away."""
    offset = torch.tensor(37)
    mask: Any = create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)[:, :, row]
    mask.mask_mod, mask.seq_lengths = (lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset), (1, S)
    token = Q[:, :, 37:38]
    wanted = torch_flex(Q, K, V, None, causal)[:, :, 37:38]
    torch.testing.assert_close(
        flex_attention(token, K, V, block_mask=mask).double(), wanted, rtol=1e-4, atol=1e-5
    )


def test_a_mask_that_has_lost_other_axes_is_refused() -> None:
    mask: Any = create_block_mask(causal, 2, 2, S, S, device="cpu", BLOCK_SIZE=16)[torch.tensor(0)]
    mask.mask_mod = causal
    with pytest.raises(ValueError, match=r"lists of \[B, H, 3\] block rows, got \[2, 3\]: an index of one"):
        flex_attention(Q, K, V, block_mask=mask)
