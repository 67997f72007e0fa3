"""New tokens against pages and packed keys: what vLLM's argument list cannot say, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.adapters import pages as pages_module
from attnc.adapters import specs
from attnc.adapters.pages import attend, attend_packed, uniform
from attnc.adapters.specs import Wanted, kernel_name
from attnc.paging.trees import WORDS, pack_bits
from tests.adapters import oracle

HEADS, GROUP, SIZE = 2, 3, 16


def check(
    tokens: int,
    lengths: list[int],
    *,
    page: int = 8,
    heads: int = HEADS,
    group: int = GROUP,
    size: int = SIZE,
    value: int = SIZE,
    latent: bool = False,
    left: int = -1,
    tree: torch.Tensor | None = None,
    words: torch.dtype | None = None,
    scale: float = 0.2,
    dtype: torch.dtype = torch.float32,
    queries: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """The new tokens of sequences with so many keys: `tokens` of each, or `queries`. words: of the tree."""
    k, v, table, keys, values = oracle.pages(lengths, page, heads, size)
    k, v = k.to(dtype), v[..., :value].to(dtype)
    counts = [tokens] * len(lengths) if queries is None else queries
    q = torch.randn(sum(counts), heads * group, size).to(dtype)
    out = torch.full((*q.shape[:2], value), torch.nan, dtype=dtype, device=device)
    attend(
        q.to(device),
        k.to(device),
        None if latent else v.to(device),
        out,
        cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        scale=scale,
        left=left,
        softcap=0.0,
        by_head={},
        tokens=tokens,
        tree=tree if tree is None or words is None else pack_bits(tree, words),
    )
    out = out.cpu()
    within = 1e-5 if dtype is torch.float32 else 2e-2
    for b, (own, found) in enumerate(zip(torch.split(q, counts), torch.split(out, counts), strict=True)):
        rows = keys[b].to(dtype)
        columns = rows[..., :value] if latent else values[b][..., :value].to(dtype)
        expected, _ = oracle.attend(
            own, rows, columns, scale=scale, left=left, tree=None if tree is None else tree[b]
        )
        torch.testing.assert_close(found.double(), expected, rtol=within, atol=within)


def chosen(sequences: int, tokens: int) -> torch.Tensor:
    """Trees where a token sees itself and any others."""
    tree = torch.rand(sequences, tokens, tokens) < 0.4
    return tree | torch.eye(tokens, dtype=torch.bool)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("left", [-1, 9])
@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_trees(tokens: int, left: int) -> None:
    torch.manual_seed(1)
    check(tokens, [30, tokens, 17], tree=chosen(3, tokens), left=left)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("tokens", [3, 12, 33])
def test_trees_in_words(tokens: int, words: torch.dtype) -> None:
    torch.manual_seed(2)
    check(tokens, [40, tokens, 37], tree=chosen(3, tokens), words=words)


def test_words_that_do_not_fit_are_named() -> None:
    tree = chosen(2, 4)
    with pytest.raises(TypeError, match=r"tree: expected dtype torch.bool, .*, got torch.int16"):
        check(4, [20, 9], tree=tree.short())
    with pytest.raises(ValueError, match=r"tree: expected shape \[2, 4, 1\], got \[2, 4, 4\]"):
        check(4, [20, 9], tree=tree.int())


def test_a_chain_is_a_tree() -> None:
    check(4, [20, 9], tree=torch.ones(2, 4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 4, 4), (4, 4)], ids=str)
def test_trees_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tree: expected shape \[2, 4, 4\], got \["):
        check(4, [20, 9], tree=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="tree: expected None where sequences have"):
        check(0, [20, 9], queries=[1, 2], tree=torch.ones(shape, dtype=torch.bool))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "queries"), [(1, None), (4, None), (0, [5, 0, 11])])
def test_values_that_are_columns_of_the_keys(
    tokens: int, queries: list[int] | None, dtype: torch.dtype
) -> None:
    """Latent attention, as one head for all queries, or as some."""
    for heads in (1, 2):
        check(tokens, [20, 5, 33], heads=heads, size=40, value=32, latent=True, dtype=dtype, queries=queries)


@pytest.mark.parametrize(("tokens", "queries"), [(2, None), (0, [5, 0, 11])])
def test_latent_attention_of_deepseek(tokens: int, queries: list[int] | None) -> None:
    check(
        tokens,
        [20, 5, 33],
        page=16,
        heads=1,
        size=576,
        value=512,
        latent=True,
        dtype=torch.bfloat16,
        queries=queries,
    )


@pytest.mark.parametrize(("tokens", "queries"), [(1, None), (0, [5, 0, 11])])
def test_values_of_another_width(tokens: int, queries: list[int] | None) -> None:
    check(tokens, [20, 5, 33], size=24, value=16, queries=queries)


@pytest.mark.parametrize(
    ("tokens", "most", "sequences", "found"),
    [
        (3, 1, 3, 1),
        (12, 4, 3, 4),
        (11, 4, 3, 0),
        (17, 17, 1, 0),
        (0, 0, 3, 0),
        (0, 1, 0, 1),
    ],
)
def test_when_all_have_as_many(tokens: int, most: int, sequences: int, found: int) -> None:
    assert uniform(tokens, most, sequences) == found


def test_one_kernel_for_any_number_of_drafts_that_fill_a_tile_as_well() -> None:
    """How many drafts there are is no part of the kernel, but for the rows of a tile."""
    pages_module._kernel_name.cache_clear()
    for tokens in (6, 7, 8):
        check(tokens, [20])
    assert pages_module._kernel_name.cache_info().currsize == 1


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), min_size=1, max_size=4),
    causal=st.booleans(),
    lse=st.booleans(),
)
@settings(max_examples=15)
def test_packed_tokens_against_packed_keys(lengths: list[tuple[int, int]], causal: bool, lse: bool) -> None:
    queries = [new for new, _ in lengths]
    keys = [new + old if causal else old for new, old in lengths]
    q, k = torch.randn(sum(queries), HEADS * GROUP, 24), torch.randn(sum(keys), HEADS, 24)
    both = torch.randn(sum(keys), HEADS, 40)  # values are columns of a wider projection
    v = both[..., 24:]
    given: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, *queries]).cumsum(0),
        "cu_seqlens_k": torch.tensor([0, *keys]).cumsum(0),
    }
    found = attend_packed(q, k, v, scale=0.3, causal=causal, lse=lse, **given)
    o = found[0] if isinstance(found, tuple) else found
    parts = [torch.split(x, sizes) for x, sizes in ((q, queries), (k, keys), (v, keys), (o, queries))]
    expected = [
        oracle.attend(own, rows, columns, scale=0.3, causal=causal)
        for own, rows, columns, _ in zip(*parts, strict=True)
    ]
    wanted = torch.cat([o for o, _ in expected]) if expected else o
    torch.testing.assert_close(o.double(), wanted, rtol=1e-5, atol=1e-5)
    assert isinstance(found, tuple) == lse
    if isinstance(found, tuple):
        wanted = torch.cat([lse for _, lse in expected]).mT
        torch.testing.assert_close(found[1].double(), wanted, rtol=1e-5, atol=1e-5)


def test_tensors_of_a_model_that_is_trained_are_served() -> None:
    """Outside of torch.no_grad(), as where an engine's graph runner captures the steps of a draft."""
    q, k, v = (torch.randn(6, 2, 16, requires_grad=True) for _ in "qkv")
    pages = torch.randn(4, 8, 2, 16)
    ends, out = torch.tensor([0, 6], dtype=torch.int32), torch.empty(6, 2, 16)
    with torch.enable_grad():
        attend(
            q,
            pages,
            pages,
            out,
            cu_seqlens_q=ends,
            seqused_k=torch.tensor([9], dtype=torch.int32),
            block_table=torch.tensor([[2, 1]], dtype=torch.int32),
            scale=0.2,
            left=-1,
            softcap=0.0,
            by_head={},
            tokens=6,
        )
        o = attend_packed(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, scale=0.2, causal=True, lse=False)
    assert isinstance(o, torch.Tensor)
    assert not out.requires_grad
    assert not o.requires_grad


def test_packed_results_go_where_they_are_wanted() -> None:
    q, out = torch.randn(5, 2, 16), torch.empty(5, 2, 16)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    found = attend_packed(
        q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, scale=1.0, causal=True, lse=False, out=out
    )
    assert found is out
    plain = out.clone()
    o, lse = attend_packed(
        q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, scale=1.0, causal=True, lse=True, out=out.zero_()
    )
    assert o is out
    assert torch.equal(o, plain)
    assert lse.shape == (2, 5)


def test_under_an_order_a_token_has_the_same_bits_in_every_call() -> None:
    """Decoding, drafts and a chunk of a prompt, alone and beside others, in pages of another size."""
    torch.manual_seed(3)
    length, segment, chunk = 81, 64, 9
    rows = torch.randn(length, 2, HEADS, SIZE)
    q = torch.randn(chunk, HEADS * GROUP, SIZE)

    def run(tokens: int, page: int, others: int, *, packed: bool = False) -> torch.Tensor:
        """Returns what the last token is given in a call with `tokens` of it and of other sequences."""
        lengths = [length, *range(20, 20 + 7 * others, 7)]
        table = torch.zeros(len(lengths), -(-length // page), dtype=torch.int32)
        pools: list[torch.Tensor] = []
        for b, count in enumerate(lengths):
            pages = -(-count // page)
            table[b, :pages] = len(pools) + torch.randperm(pages)
            own = torch.zeros(pages, page, 2, HEADS, SIZE)
            data = rows if b == 0 else torch.randn(count, 2, HEADS, SIZE)
            for at in range(count):
                own[table[b, at // page] - len(pools), at % page] = data[at]
            pools += [*own]
        keys = torch.stack(pools)
        queries = torch.cat([q[chunk - tokens :], torch.randn(tokens * others, HEADS * GROUP, SIZE)])
        out = torch.full_like(queries, torch.nan)
        attend(
            queries,
            keys[:, :, 0],
            keys[:, :, 1],
            out,
            cu_seqlens_q=torch.arange(0, len(queries) + 1, tokens, dtype=torch.int32),
            seqused_k=torch.tensor(lengths, dtype=torch.int32),
            block_table=table,
            scale=0.2,
            left=-1,
            softcap=0.0,
            by_head={},
            tokens=0 if packed else tokens,
            order=segment,
        )
        return out[tokens - 1]

    expected = run(1, 8, 0)
    assert torch.equal(run(1, 16, 2), expected)
    assert torch.equal(run(4, 8, 0), expected)
    assert torch.equal(run(1, 8, 1, packed=True), expected)
    assert torch.equal(run(chunk, 16, 1, packed=True), expected)


def test_under_an_order_packed_latents_have_the_bits_of_decoding() -> None:
    """Prompts and chunks of several lengths, with tokens behind them that belong to none."""
    torch.manual_seed(0)
    lengths, heads, page, rank = (81, 20, 33), 16, 16, 264
    keys = [torch.randn(n, 1, rank + 8).bfloat16() for n in lengths]
    queries = [torch.randn(n, heads, rank + 8).bfloat16() for n in lengths]

    def run(parts: Sequence[tuple[int, int, int]], *, tokens: int = 0, behind: int = 0) -> torch.Tensor:
        """Returns what rows first .. last - 1 of sequences are given, each with its first `last` keys."""
        table = torch.full((len(parts), 6), 1 << 20, dtype=torch.int32)
        pools: list[torch.Tensor] = []
        for b, (sequence, _, last) in enumerate(parts):
            for at in range(0, last, page):
                own = keys[sequence][at : min(at + page, last)]
                table[b, at // page] = len(pools)
                pools.append(
                    torch.cat([own, torch.full((page - len(own), 1, rank + 8), torch.nan).bfloat16()])
                )
        q = torch.cat([queries[i][first:last] for i, first, last in parts])
        q = torch.cat([q, torch.full((behind, heads, rank + 8), torch.nan).bfloat16()])
        out = torch.full((len(q), heads, rank), torch.nan).bfloat16()
        counts = torch.tensor([0, *(last - first for _, first, last in parts)])
        attend(
            q,
            torch.stack(pools),
            None,
            out,
            cu_seqlens_q=counts.cumsum(0).int(),
            seqused_k=torch.tensor([last for *_, last in parts], dtype=torch.int32),
            block_table=table,
            scale=0.06,
            left=-1,
            softcap=0.0,
            by_head={},
            tokens=tokens,
            order=64,
        )
        return out[: len(q) - behind]

    whole = run([(0, 72, 81), (1, 19, 20), (2, 0, 33)], behind=3)
    expected, _ = oracle.attend(queries[0][72:81], keys[0], keys[0][..., :rank], scale=0.06, causal=True)
    torch.testing.assert_close(whole[:9].double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(run([(0, 80, 81)], tokens=1)[0], whole[8])
    assert torch.equal(run([(0, 77, 81)], tokens=4), whole[5:9])
    other = run([(2, 0, 30), (0, 50, 79)])
    assert torch.equal(other[:30], whole[10:40])
    assert torch.equal(other[52:], whole[:7])


@pytest.mark.parametrize(
    ("heads", "sequences", "tokens", "fills"),
    [(128, 50, 1, True), (128, 49, 1, False), (16, 25, 16, True), (16, 99, 4, True), (16, 98, 4, False)],
)
def test_many_sequences_fill_a_gpu(
    heads: int, sequences: int, tokens: int, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 rows, of 132 multiprocessors."""
    monkeypatch.setattr(pages_module, "gpu_of", lambda index: SimpleNamespace(multiprocessors=132))
    q = SimpleNamespace(is_cuda=True, get_device=lambda: 0, shape=(sequences * tokens, heads, 576))
    assert pages_module._fill_device(cast(Any, q), sequences, tokens) is fills
    assert not pages_module._fill_device(torch.zeros(1, heads, 8), sequences, tokens)


@pytest.mark.parametrize(("most", "converts"), [(8, True), (9, False)])
def test_prompts_on_caches_of_8_bits_are_converted_by_their_rows(
    most: int, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "ROWS_TO_CONVERT", most)
    wanted: list[Wanted] = []

    def note(made: Wanted) -> str:
        wanted.append(made)
        return kernel_name(made)

    monkeypatch.setattr(pages_module, "kernel_name", note)
    pages_module._kernel_name.cache_clear()
    k, v, table, _, _ = oracle.pages([9, 12], 8, 2, 16)
    q = torch.randn(8, 4, 16, dtype=torch.bfloat16)
    attend(
        q,
        k.to(torch.float8_e4m3fn),
        v.to(torch.float8_e4m3fn),
        torch.empty_like(q),
        cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32),
        seqused_k=torch.tensor([9, 12], dtype=torch.int32),
        block_table=table,
        scale=0.1 * most,  # so that no call is a repeated one
        left=-1,
        softcap=0.0,
        by_head={},
        tokens=0,
    )
    assert [x.converts for x in wanted] == [converts]


@pytest.mark.parametrize("is_cached", [False, True])
def test_caches_of_8_bits_are_converted_for_prompts_where_that_is_faster(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: list[Any] = []

    class Asked(Exception):
        pass

    def kernel_of(form: Any) -> str:
        forms.append(form)
        raise Asked

    suits = True
    monkeypatch.setattr(pages_module, "_kernel_name", kernel_of)
    monkeypatch.setattr(pages_module, "suits_conversion", lambda *given: suits)
    dtype = torch.float16
    k = torch.zeros(4, 16, 2, 16, dtype=torch.float8_e4m3fn if is_cached else dtype)
    q = torch.zeros(6, 4, 16, dtype=dtype)
    table, used = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)

    def asked(v: Any = k, tokens: int = 0, by_name: Any = None, **options: Any) -> Any:
        by_head = {"alibi_slopes": None, "sinks": None, **(by_name or {})}
        with pytest.raises(Asked):
            attend(
                q, k, v, torch.zeros_like(q), cu_seqlens_q=starts, seqused_k=used, block_table=table,
                scale=0.25, left=-1, softcap=0.0, by_head=by_head, tokens=tokens, **options,
            )  # fmt: skip
        return forms[-1]

    for suits in (False, True):
        assert asked().converts == (is_cached and suits)
        assert not asked(tokens=3).converts
        assert not asked(few=True).converts
        assert not asked(v=None).converts
    for bias, apart in ((torch.zeros(3, 3), False), (torch.zeros(2, 3, 3), True)):
        assert asked(qq_bias=bias, tokens=3).biased_apart == apart
    for name in ("alibi_slopes", "sinks"):
        for wrong in (torch.zeros(3), torch.zeros(4, 1), torch.zeros(4, dtype=torch.bool)):
            with pytest.raises((TypeError, ValueError), match=name):
                asked(by_name={name: wrong})


def test_a_bias_of_new_tokens_is_one_or_one_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Wanted] = []

    def named(wanted: Wanted) -> str:
        made.append(wanted)
        return "it"

    monkeypatch.setattr(pages_module, "kernel_name", named)
    form = pages_module._PageForm(
        dtype=torch.float16, cache=None, head_dim=16, value_dim=16, latent=False, page=16, scale=0.25,
        left=-1, softcap=0.0, causal=True, inputs=frozenset(["qq_bias"]), tree=None, biased_apart=False,
        split=True, few=False, rows=16, is_long=False, converts=False, order=0, walks=False,
    )  # fmt: skip
    for apart in (False, True):
        pages_module._kernel_name.__wrapped__(form._replace(biased_apart=apart))
        (line,) = (line for line in made[-1].inputs if line.startswith("qq_bias"))
        assert line == f"qq_bias: f32[{'B, ' if apart else ''}X, X]"
