"""One token, or a few, against keys spread over ranks by blocks: joined by lse, sinks counted once."""

from typing import Any

import numpy as np
import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.distributed.decode import Spread, SpreadKeys
from attnc.distributed.kernels import spec_of
from attnc.distributed.verify import joined_bound
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.problem import build
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Verdict, judge
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()

SPEC = """
attention token {{
  input q: {dtype}[B, M, Hkv * G, 16]
  input k, v: {dtype}[B, N, Hkv, 16]{storage}
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


def spec(dtype: str = "f32", mask: str = "causal", sink: bool = False, page: int = 0) -> str:
    more = ["input sink: f32[Hkv * G]"] if sink else []
    more += ["input table: i32[B, P]"] if page else []
    return SPEC.format(
        dtype=dtype,
        storage=f" via paged(table, page = {page})" if page else "",
        more="\n  ".join(more),
        mask=mask,
        normalize="softmax(sink = sink[h])" if sink else "softmax",
    )


def own_pages(rows: list[torch.Tensor], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with the rows of each sequence in pages, and its table, in which pages come backwards."""
    counts = [max(-(-len(x) // page), 1) for x in rows]
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    pool = torch.full((sum(counts), page, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    free = list(range(sum(counts)))
    for b, x in enumerate(rows):
        for number in range(counts[b]):
            table[b, number] = at = free.pop()
            part = x[number * page : (number + 1) * page]
            pool[at, : len(part)] = part
    return pool, table


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
            counts = spread.counts(inputs["kv_len"].clamp(0, k.shape[1]), rank).tolist()
            parts = [own_pages([x[b, :n] for b, n in enumerate(counts)], page) for x in own]
            own, named["table"] = [pool for pool, _ in parts], parts[0][1]
        o, lse = keys(q, *own, **named)
        return {"o": o, "lse": lse}

    found = on_ranks(ranks, work)
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(x.nan_to_num(), other[name].nan_to_num()), "every rank has the same bits"
    bound = joined_bound(spec_of(text), ranks)
    return judge(attention, expect(attention, problem.inputs, bound), found[0])


@pytest.mark.parametrize(
    ("text", "dims", "ranks", "block"),
    [
        (spec(), {"B": 2, "M": 1, "N": 75, "Hkv": 2, "G": 2}, 3, 4),
        (spec("bf16", sink=True), {"B": 3, "M": 2, "N": 50, "Hkv": 1, "G": 3}, 2, 16),
        (spec(mask="window(20, 0)", sink=True), {"B": 2, "M": 1, "N": 90, "Hkv": 2, "G": 1}, 4, 1),
        (spec(), {"B": 2, "M": 1, "N": 3, "Hkv": 1, "G": 1}, 4, 8),  # ranks without a key
    ],
)
def test_keys_on_many_ranks(text: str, dims: dict[str, int], ranks: int, block: int) -> None:
    verdict = run(text, dims, ranks, block, seed=3)
    assert verdict.ok, verdict.message


def test_pages_of_many_ranks() -> None:
    verdict = run(spec(page=8, sink=True), {"B": 2, "M": 1, "N": 60, "Hkv": 1, "G": 2}, 2, 8, page=8)
    assert verdict.ok, verdict.message


def test_a_spread_names_every_position_once() -> None:
    spread = Spread(3, 4)
    lengths = torch.arange(0, 60, dtype=torch.int32)
    counts = torch.stack([spread.counts(lengths, rank) for rank in range(3)])
    assert torch.equal(counts.sum(0).int(), lengths)
    for length in (0, 1, 12, 13, 59):
        found = [spread.positions(int(counts[rank][length]), rank, lengths.device) for rank in range(3)]
        assert np.array_equal(np.sort(torch.cat(found).numpy()), np.arange(length))


def test_what_has_no_length_is_refused() -> None:
    text = spec().replace("length N = kv_len[b]", "").replace("causal", "causal and kv_idx < kv_len[b]")
    with pytest.raises(DiagnosticError) as refused:
        on_ranks(1, lambda group: SpreadKeys(text, group))
    assert "need the length of each sequence" in refused.value.diagnostics[0].message
