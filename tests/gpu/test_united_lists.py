"""Tiles of neighbouring queries that visit the union of their lists of blocks, at sizes of a GPU."""

from __future__ import annotations

import pytest
import torch

import attnc

#: Plain and packed queries, whose heads fill a quarter of a tile.
TEXT = """attention a {
  input q: bf16[QUERIES, 32, 64] STORAGE
  input k, v: bf16[B, N, 2, 64]
  input idx: i32[LISTS, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = KEYS) and causal
  normalize = softmax
  output o: bf16[QUERIES, 32, 64]
}
schedule a for cuda.sm_90a {
  loops = [kv], pack = gqa, lists = union, overlap = true SPLIT
}
"""
PLAIN = {"QUERIES": "B, M", "STORAGE": "", "LISTS": "B, 2, M", "EXTRAS": ""}
PACKED = {
    "QUERIES": "T",
    "STORAGE": "via ragged(cu)",
    "LISTS": "T, 2",
    "EXTRAS": "input cu: i32[B + 1]\n  input n: i32[B]\n  length N = n[b]",
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of 'cuda.sm_90a' run on Hopper alone")
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")


def text(keys: int, split: str, words: dict[str, str]) -> str:
    made = TEXT
    for word, value in {**words, "KEYS": str(keys), "SPLIT": split}.items():
        made = made.replace(word, value)
    return made


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).bfloat16()


def expect(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, idx: torch.Tensor, pos: int, keys: int
) -> torch.Tensor:
    """o of one query at a position: q [32, 64], k and v [N, 2, 64], idx [2, S]."""
    rows = []
    for h in range(32):
        listed = idx[h // 16].long()
        named = torch.zeros(-(-len(k) // keys), device="cuda", dtype=torch.bool)
        named[listed[(listed >= 0) & (listed < len(named))]] = True
        seen = named.repeat_interleave(keys)[: len(k)] & (torch.arange(len(k), device="cuda") <= pos)
        s = (k[:, h // 16].double() @ q[h].double() / 8)[seen]
        rows.append(torch.softmax(s, 0) @ v[:, h // 16].double()[seen])
    return torch.stack(rows)


def draw_lists(queries: int, blocks: int, size: int) -> torch.Tensor:
    """[2, queries, size], with entries that name no block, and repeated ones."""
    idx = torch.randint(-2, blocks + 2, (2, queries, size), device="cuda", dtype=torch.int32)
    idx[:, ::7, 0] = 2**31 - 1
    idx[:, ::5, -1] = idx[:, ::5, 1]
    idx[:, 3::11] = -1
    return idx


@pytest.mark.parametrize("split", ["", ", split.kv = auto", ", split.kv = 3"])
def test_65536_queries(split: str) -> None:
    made = attnc.compile(text(64, split, PLAIN))
    M, N = 65_536, 65_600
    q, k, v = draw(1, M, 32, 64), draw(1, N, 2, 64), draw(1, N, 2, 64)
    idx = draw_lists(M, -(-N // 64), 12)
    o = made(q, k, v, idx[None])
    for row in (0, 1, 3, 4, 777, 32_767, 32_768, 65_532, 65_533, 65_535):
        wanted = expect(q[0, row], k[0], v[0], idx[:, row], row + N - M, 64)
        assert (o[0, row].double() - wanted).abs().max() < 0.03, row


@pytest.mark.parametrize("split", ["", ", split.kv = auto", ", split.kv = 3"])
def test_packed_sequences_of_any_length_beside_nan_in_keys_that_no_list_names(split: str) -> None:
    made = attnc.compile(text(32, split, PACKED))
    lengths = [0, 1, 2, 3, 64, 65, 700, 4, 0, 33_000]
    N, T = 34_000, sum(lengths) + 9  # rows that belong to no sequence
    cu = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0).int()
    n = torch.tensor([max(x, 1000) + 30 * i for i, x in enumerate(lengths)], device="cuda", dtype=torch.int32)
    q, k, v = draw(T, 32, 64), draw(len(lengths), N, 2, 64), draw(len(lengths), N, 2, 64)
    idx = draw_lists(T, -(-N // 32), 9)
    idx = torch.where((idx >= 0) & (idx < 1 << 20) & (idx % 8 == 5), 3, idx)  # nobody names these blocks
    unnamed = torch.arange(N, device="cuda") // 32 % 8 == 5
    k[:, unnamed], v[:, unnamed] = torch.nan, torch.nan
    o = made(q=q, k=k, v=v, idx=idx.transpose(0, 1).contiguous(), cu=cu, n=n)
    assert o.isfinite().all()
    assert not o[cu[-1] :].any()
    for b, length in enumerate(lengths):
        for row in sorted({0, 1, 2, length // 2, length - 1}):
            if 0 <= row < length:
                at, keys = int(cu[b]) + row, int(n[b])
                known = k[b, :keys].nan_to_num(), v[b, :keys].nan_to_num()
                wanted = expect(q[at], *known, idx[:, at], row + keys - length, 32)
                assert (o[at].double() - wanted).abs().max() < 0.03, (b, row)


def test_splits_of_changed_lists_in_a_graph() -> None:
    """A graph serves whatever lists name when it is replayed, by the same splits."""
    made = attnc.compile(text(16, ", split.kv = auto", PLAIN))
    q, k, v = draw(2, 37, 32, 64), draw(2, 20_000, 2, 64), draw(2, 20_000, 2, 64)
    idx = torch.stack([draw_lists(37, 1250, 40) for _ in range(2)])
    made(q, k, v, idx)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = made(q, k, v, idx)
    for lists in (idx * 0, torch.full_like(idx, -1), torch.roll(idx, 5, 2)):
        idx.copy_(lists)
        graph.replay()
        for b, row in ((0, 0), (0, 36), (1, 17)):
            wanted = expect(q[b, row], k[b], v[b], idx[b, :, row], row + 20_000 - 37, 16)
            assert (o[b, row].double() - wanted).abs().max() < 0.03
