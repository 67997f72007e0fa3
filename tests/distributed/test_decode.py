"""One token, or a few, against keys spread over ranks by blocks: joined by lse, sinks counted once."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from attnc.distributed.decode import SpreadKeys
from attnc.distributed.group import Alone
from attnc.distributed.kernels import RankKernels, RankSpec, spec_of
from attnc.model.dtypes import DType
from attnc.paging import OutOfPages, PagedCache, Spread, Step
from attnc.plan.ir import ErrorBound
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.problem import build
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Verdict, judge
from tests.distributed.threads import Thread, on_ranks
from tests.refusals import refused

ensure_interpreter()

SPEC = """
attention token {{
  input q: {dtype}[B, M, Hkv * G, 16]
  input k: {k_type}[B, N, Hkv, 16]{storage}
  input v: {v_type}[B, N, Hkv, 16]{storage}
  input kv_len: i32[B]
  {more}
  length N = kv_len[b]
  score = dot(q, k) / sqrt(D)
  mask = {mask}
  normalize = {normalize}
  output o: {dtype}[B, M, Hkv * G, 16]
  output lse: f32[B, Hkv * G, M]
}}
schedule token for triton {{
  loops = [kv], pack = gqa
  tile.q = 16, tile.kv = 16
}}
"""


def spec(
    dtype: str = "f32",
    mask: str = "causal",
    sink: bool = False,
    page: int = 0,
    narrow: tuple[str, str] = ("", ""),
) -> str:
    """narrow: types of k and v, where these have 8 bits; v has a scale then."""
    more = ["input sink: f32[Hkv * G]"] if sink else []
    more += ["input vs: f32[Hkv]"] if any(narrow) else []
    more += ["input table: i32[B, P]"] if page else []
    return SPEC.format(
        dtype=dtype,
        k_type=narrow[0] or dtype,
        v_type=narrow[1] or dtype,
        storage=f" via paged(table, page = {page})" if page else "",
        more="\n  ".join(more),
        mask=mask,
        normalize="softmax(v_scale = vs[h // G])"
        if any(narrow)
        else "softmax(sink = sink[h])"
        if sink
        else "softmax",
    )


def paged(
    k: torch.Tensor, v: torch.Tensor, lengths: list[int], page: int, spread: Spread, rank: int
) -> tuple[PagedCache, Step]:
    """A rank's cache with these sequences, each appended in two pieces, and their step."""
    cache = PagedCache(
        pages=sum(-(-n // page) for n in lengths),
        page=page,
        kv_heads=k.shape[2],
        head_dim=k.shape[3],
        sequences=len(lengths),
        max_length=k.shape[1],
        spread=spread,
        rank=rank,
        dtype=k.dtype,
    )
    for pool in (cache.k(), cache.v()):
        pool.fill_(torch.nan)
    sequences = [cache.allocate() for _ in lengths]
    for piece in range(2):
        counts = [(n + piece) // 2 for n in lengths]
        begins = [cache.length(sequence) for sequence in sequences]
        step = cache.append(sequences, counts)
        assert step.own is not None
        new = [
            torch.cat([x[b, at : at + n] for b, (at, n) in enumerate(zip(begins, counts, strict=True))])
            for x in (k, v)
        ]
        cache.write(step.slots, new[0][step.own], new[1][step.own])
    return cache, cache.view(sequences)


def joined_bound(spec: RankSpec, ranks: int) -> ErrorBound:
    """Returns the bound of o and lse that so many ranks with some of the keys each found (`SpreadKeys`): one
    more partial result for each, and o in its own type at the end.
    """
    variant = spec.variants[0]
    bound = RankKernels(spec, variant, "keys").module.kernel.bound
    return replace(bound, splits=bound.splits + ranks, o_dtype=DType(variant.attention.o.dtype))


def run(text: str, dims: dict[str, int], ranks: int, block: int, seed: int = 0, page: int = 0) -> Verdict:
    """The verdict on a call over ranks, against the reference of all keys."""
    plain = spec_of(
        text.replace(f" via paged(table, page = {page})", "").replace("input table: i32[B, P]", "")
    )
    attention = plain.variants[0].attention
    problem = build(attention, Case(dims=dims, seed=seed))
    inputs: dict[str, Any] = dict(problem.inputs)
    q, k, v = (inputs.pop(name) for name in ("q", "k", "v"))

    def work(group: Thread) -> dict[str, torch.Tensor]:
        keys = SpreadKeys(text, group, block=block)
        spread, rank = keys.spread, group.rank
        positions = torch.arange(k.shape[1])
        mine = positions[spread.rank(positions) == rank]
        assert torch.equal(spread.row(mine), torch.arange(len(mine)))
        assert torch.equal(spread.positions(len(mine), rank, k.device).long(), mine)
        own = [x[:, mine] for x in (k, v)]
        named = dict(inputs)
        if page:
            lengths = inputs["kv_len"].clamp(0, k.shape[1]).tolist()
            cache, step = paged(k, v, lengths, page, spread, rank)
            for b, n in enumerate(lengths):
                assert torch.equal(cache.read(b)[0], k[b, mine[mine < n]])
            own = [cache.k(), cache.v()]
            named |= {"table": step.block_table, "kv_len": step.kv_len, "counts": step.counts}
        o, lse = keys(q, *own, **named)
        return {"o": o, "lse": lse}

    found = on_ranks(ranks, work)
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(x.nan_to_num(), other[name].nan_to_num()), "every rank has the same bits"
    bound = joined_bound(spec_of(text), ranks)
    return judge(attention, expect(attention, problem.inputs, bound), found[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("text", "dims", "ranks", "block"),
    [
        (spec(), {"B": 2, "M": 1, "N": 75, "Hkv": 2, "G": 2}, 3, 4),
        (spec("bf16", sink=True), {"B": 3, "M": 2, "N": 50, "Hkv": 1, "G": 3}, 2, 16),
        (spec(mask="window(20, 0)", sink=True), {"B": 2, "M": 1, "N": 90, "Hkv": 2, "G": 1}, 4, 1),
        (spec(), {"B": 2, "M": 1, "N": 3, "Hkv": 1, "G": 1}, 4, 8),  # ranks without a key
        (spec("bf16", narrow=("e4m3", "i8")), {"B": 2, "M": 1, "N": 60, "Hkv": 2, "G": 2}, 3, 8),
        (spec("bf16", narrow=("i8", "e5m2")), {"B": 3, "M": 3, "N": 50, "Hkv": 1, "G": 2}, 2, 16),
    ],
)
def test_keys_on_many_ranks(text: str, dims: dict[str, int], ranks: int, block: int) -> None:
    verdict = run(text, dims, ranks, block, seed=3)
    assert verdict.ok, verdict.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mask", ["causal", "window(20, 0)"])
def test_several_queries_see_the_same_keys_on_ranks_with_fewer_rows(mask: str, seed: int) -> None:
    """24, 20 and 16 of 60 rows: where the queries stand follows from the whole length, not from a rank's."""
    verdict = run(spec(mask=mask), {"B": 2, "M": 3, "N": 60, "Hkv": 1, "G": 2}, 3, 8, seed=seed)
    assert verdict.ok, verdict.message


def test_axes_of_lse_in_any_order() -> None:
    text = spec().replace("f32[B, Hkv * G, M]", "f32[Hkv * G, B, M]")
    verdict = run(text, {"B": 3, "M": 2, "N": 40, "Hkv": 2, "G": 2}, 2, 8)
    assert verdict.ok, verdict.message


def test_caches_of_several_lengths_have_positions_of_their_own() -> None:
    keys = SpreadKeys(spec(), Alone(), block=8)
    for rows in (24, 40, 24):
        tables = keys._tables_for(rows, torch.device("cpu"))
        assert tables["key_at"].tolist() == list(range(rows))
        assert tables["keys_all"].item() == rows


def test_pages_of_many_ranks() -> None:
    verdict = run(spec(page=8, sink=True), {"B": 2, "M": 1, "N": 60, "Hkv": 1, "G": 2}, 2, 8, page=8)
    assert verdict.ok, verdict.message


def test_pages_of_8_bits_of_many_ranks() -> None:
    text = spec("bf16", page=8, narrow=("e5m2", "e5m2"))
    verdict = run(text, {"B": 2, "M": 1, "N": 60, "Hkv": 1, "G": 2}, 2, 8, page=8)
    assert verdict.ok, verdict.message


def test_caches_of_all_ranks_decide_alike() -> None:
    """Forks, copies, truncation and the end of room: what each rank has of a sequence are its rows."""
    spread = Spread(3, 2)
    caches = [
        PagedCache(
            pages=4,
            page=4,
            kv_heads=1,
            head_dim=1,
            v_head_dim=0,
            sequences=3,
            max_length=40,
            spread=spread,
            rank=rank,
            dtype=torch.float32,
        )
        for rank in range(3)
    ]
    model: dict[int, list[float]] = {}
    fresh = iter(range(1000))

    def append(sequences: list[int], counts: list[int]) -> None:
        new = [[float(next(fresh)) for _ in range(n)] for n in counts]
        tokens = torch.tensor([x for some in new for x in some]).view(-1, 1, 1)
        tables = set()
        for cache in caches:
            step = cache.append(sequences, counts)
            assert step.own is not None
            assert step.counts is not None
            cache.write(step.slots, tokens[step.own])
            assert step.counts.tolist() == [
                spread.count(cache.length(sequence), cache.rank) for sequence in sequences
            ]
            tables.add(str(step.block_table.tolist()))
        assert len(tables) == 1, "all ranks have one block table"
        for sequence, some in zip(sequences, new, strict=True):
            model[sequence] += some

    def check() -> None:
        for sequence, tokens in model.items():
            whole = torch.full((len(tokens),), torch.nan)
            for cache in caches:
                (found,) = cache.read(sequence)
                whole[spread.positions(len(found), cache.rank, whole.device).long()] = found.flatten()
            assert whole.tolist() == tokens
        row = caches[0].row(next(iter(model)))
        last = [int(cache.last_slots()[row]) < cache.pages * cache.page for cache in caches]
        assert sum(last) == 1, "one rank has the last token"

    (first,) = {cache.allocate() for cache in caches}
    model[first] = []
    append([first], [15])
    check()
    (child,) = {cache.fork(first) for cache in caches}
    model[child] = list(model[first])
    append([first, child], [3, 10])
    check()
    for cache in caches:
        cache.truncate(child, 13)
    del model[child][13:]
    append([child], [1])
    check()
    for cache in caches:
        with pytest.raises(OutOfPages):
            cache.append([first], 22)
    with pytest.raises(ValueError, match="spread: expected blocks that divide pages of 4 rows"):
        PagedCache(pages=1, page=4, kv_heads=1, head_dim=1, sequences=1, max_length=9, spread=Spread(2, 3))


def test_a_spread_names_every_position_once() -> None:
    spread = Spread(3, 4)
    lengths = torch.arange(0, 60, dtype=torch.int32)
    counts = torch.stack([spread.counts(lengths, rank) for rank in range(3)])
    assert torch.equal(counts.sum(0).int(), lengths)
    for length in (0, 1, 12, 13, 59):
        assert [spread.count(length, rank) for rank in range(3)] == counts[:, length].tolist()
        found = [spread.positions(int(counts[rank][length]), rank, lengths.device) for rank in range(3)]
        assert np.array_equal(np.sort(torch.cat(found).numpy()), np.arange(length))


@pytest.mark.parametrize(
    ("length", "mask"),
    [("", "causal and kv_idx < kv_len[b]"), ("length N = kv_len[B - 1 - b]", "causal")],
)
def test_what_has_no_length_of_each_sequence_is_refused(length: str, mask: str) -> None:
    text = spec().replace("length N = kv_len[b]", length).replace("causal", mask)
    found = refused(on_ranks, 1, lambda group: SpreadKeys(text, group))
    assert "need the length of each sequence" in found.message


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("q", "T, Hkv * G", "packed queries against keys on many ranks are not compiled"),
        ("k", "S, Hkv", "packed keys are not spread over ranks"),
    ],
)
def test_packed_rows_are_refused(name: str, rows: str, said: str) -> None:
    """Keys of a sequence are dealt out by their number in it."""
    text = spec().replace("input kv_len: i32[B]", "input kv_len: i32[B]\n  input ends: i32[B + 1]")
    packed = f"[{rows}, 16] via ragged(ends)"
    if name == "q":
        text = text.replace("q: f32[B, M, Hkv * G, 16]", f"q: f32{packed}")
        text = text.replace("o: f32[B, M,", "o: f32[T,").replace("[B, Hkv * G, M]", "[T, Hkv * G]")
    else:
        text = text.replace("[B, N, Hkv, 16]", packed)
    found = refused(on_ranks, 1, lambda group: SpreadKeys(text, group))
    assert (found.code, found.message) == ("E0602", said)


def test_inputs_that_the_spec_does_not_have_are_refused() -> None:
    def work(group: Thread) -> None:
        keys = SpreadKeys(spec(), group)
        q, k, lengths = torch.ones(1, 1, 2, 16), torch.ones(1, 16, 1, 16), torch.ones(1, dtype=torch.int32)
        for given, named, error, message in (
            ((lengths, 0.5), {}, TypeError, "inputs: expected kv_len, got 2"),
            ((), {"kv_len": lengths, "scale": 0.5}, TypeError, "scale: not an input; the spec has kv_len"),
            ((lengths,), {"kv_len": lengths}, TypeError, "kv_len: expected one value, got one by place"),
            ((), {}, ValueError, "kv_len: expected an input, none was given"),
        ):
            with pytest.raises(error, match=message):
                keys(q, k, k, *given, **named)

    on_ranks(1, work)


def test_what_has_no_module_is_no_source() -> None:
    with pytest.raises(TypeError, match="source: expected a generated function, a spec or its path"):
        spec_of(partial(print, 1))


def test_a_block_has_a_key_or_more() -> None:
    assert SpreadKeys(spec(), Alone(), block=1).spread.block == 1
    with pytest.raises(ValueError, match="block: expected at least 1, got 0"):
        SpreadKeys(spec(), Alone(), block=0)


def test_the_first_input_that_is_missing_is_named() -> None:
    keys = SpreadKeys(spec(sink=True), Alone())
    with pytest.raises(ValueError, match=r"^kv_len: expected an input, none was given"):
        keys(torch.zeros(1, 1, 2, 16), *torch.zeros(2, 1, 16, 2, 16))


def test_ranks_choose_kernels_for_few_queries_where_a_spec_has_no_schedule() -> None:
    bare = spec().partition("\nschedule ")[0]
    verdict = run(bare, {"B": 2, "M": 1, "N": 70, "Hkv": 1, "G": 2}, 2, 8)
    assert verdict.ok, verdict.message
