"""What a rank computes is the same attention over its own rows and keys, at the places these have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from attnc.diagnostics import DiagnosticError
from attnc.distributed.derive import Derived, Form, View, derive
from attnc.distributed.estimate import STRATEGIES, Strategy
from attnc.distributed.kernels import check_covered
from attnc.distributed.offers import Chunks
from attnc.distributed.plan import Plan, Planner, RowGroup
from attnc.distributed.spans import CallSizes, Visibility, Widths
from attnc.distributed.views import tables_of, view_of
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Binary, Const, Dim, Dot, Expr, show
from attnc.model.dtypes import DType
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.paging.spread import Spread
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.distributed.calls import GROUP, HEADS, Call, calls
from tests.distributed.specs import SPECS, text
from tests.expr.masks import floats, tensors
from tests.expr.spell import spell

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"
#: What masks and scores of `tests.expr` read.
INPUTS = (
    "kv_len, prefix: i32[B]", "width: i32[H]", "doc: i32[B, N] is sorted", "tag: i32[B, N]",
    "slope: f32[H]", "time: f32[B, N]", "bias: f32[H, M, N]", "flag: bool[B]",
    "keep: bool[B, N]", "limit: i64[B]", "stamp: i64[B, N] is sorted",
)  # fmt: skip


def program_of(spec: str) -> Program:
    return resolve(parse(Source("spec.attn", spec)), prelude())


def spec_of(call: Call, score: Expr) -> str:
    lengths = "\n  ".join(f"length {name} = {show(length)}" for name, length in call.lengths.items())
    packed, packed_keys = (ends is not None for ends in (call.sizes.ends_q, call.sizes.ends_k))
    return text(
        show(call.mask),
        score=show(score),
        inputs=INPUTS,
        length=lengths,
        packed=packed,
        packed_keys=packed_keys,
    )


def whole(call: Call, expr: Expr) -> npt.NDArray[Any]:
    """[sequences, heads, queries, keys] of an expression, nan where a length or a sequence ends; all
    sequences are one where they are packed.
    """
    sizes = call.sizes
    batch = 1 if sizes.ends_q is not None else sizes.batch
    found = np.full((batch, HEADS, sizes.queries, sizes.keys), np.nan)
    for b in range(sizes.batch):
        for h in range(HEADS):
            rows, keys, value = call.of_head(expr, b, h)
            found[b % batch, h, rows, keys] = value
    return found


class Rank:
    """A derived spec, and what its inputs are on one rank for some rows and heads."""

    def __init__(self, derived: Derived) -> None:
        self.derived = derived
        self.attention = program_of(derived.text).attentions[0]

    def values(
        self, expr: Expr, inputs: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int, int, int]
    ) -> npt.NDArray[Any]:
        """An expression of the derived spec, [sequences, heads, queries, keys]."""
        dims: dict[str, Any] = dict(zip(("B", "H", "M", "N"), shape, strict=True))
        dims |= {"Hkv": dims["H"] // GROUP, "G": GROUP}
        for tensor in self.attention.extras:
            for size, extent in zip(tensor.shape, inputs[tensor.name].shape, strict=True):
                if isinstance(size, Dim):
                    dims.setdefault(size.name, extent)
        at = np.ogrid[tuple(slice(size) for size in shape)]
        indices: dict[str, Any] = dict(zip(("b", "h", "q_idx", "kv_idx"), at, strict=True))
        for name, length in self.attention.lengths.items():
            dims[name] = np.clip(
                evaluate(length, Env(indices=indices, tensors=inputs, dims=dims)), 0, dims[name]
            )
        env = Env(indices=indices, tensors=inputs, dims=dims, dot=np.zeros(shape))
        return np.broadcast_to(evaluate(expr, env), shape)


def inputs_of(
    derived: Derived,
    call: Call,
    plan: Plan,
    part: RowGroup,
    tables: Mapping[str, torch.Tensor],
    first: int,
    heads: int,
) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for item in derived.inputs:
        if isinstance(item, View):
            x = torch.from_numpy(np.ascontiguousarray(call.sizes.tensors[item.tensor]))
            found[item.name] = view_of(item, part, tables, x, first, heads).numpy()
        else:
            found[item] = np.asarray(first) if item == "head_first" else tables[item].numpy()
    return found


def call_of(mask: str) -> Call:
    """Sequences that end before their tensors do, beside numbers at the ends of 64 bits."""
    drawn = tensors(np.random.default_rng(0), 3, HEADS, 33, 16)
    drawn["kv_len"] = np.array([2, 7, 16])
    drawn["limit"] = np.array([2**63 - 1, -(2**63), 2**63 - 2])
    sizes = CallSizes(
        batch=3, queries=33, keys=16, heads=HEADS, kv_heads=HEADS // GROUP, tensors=drawn
    )  # fmt: skip
    return Call(mask=spell(mask), lengths={"N": spell("kv_len[b]")}, sizes=sizes, ranks=2)


FAR = call_of("q_pos > limit[b] or stamp[b, kv_idx] // 8 - q_pos > stamp[b, 15]")
ENDED = call_of("doc[b, 7] <= q_pos and tag[b, h] < tag[b, q_idx]")


@settings(max_examples=min(settings().max_examples, 90) // 3)
@example(FAR, Const(1.5), 1)
@example(ENDED, spell("time[b, h]"), 4)
@given(calls(), floats(), st.sampled_from((1, 4, 16)))
def test_a_rank_sees_its_keys_of_a_sequence(call: Call, bias: Expr, block: int) -> None:
    """Mask and scores of decoding, where blocks of keys are dealt to the ranks in turn."""
    tensors = {**call.sizes.tensors}
    tensors["kv_len"] = tensors["kv_len"].clip(max=call.sizes.keys)
    sizes = replace(call.sizes, tensors=tensors, ends_q=None, ends_k=None)
    call = replace(call, sizes=sizes, lengths={"N": spell("kv_len[b]")})
    try:
        program = program_of(spec_of(call, Binary("+", Dot(), bias)))
    except DiagnosticError:
        reject()
    attention = program.attentions[0]
    rank = Rank(derive(program, attention, {}, "triton", "keys"))
    seen, scores = whole(call, attention.mask), whole(call, attention.score)
    spread = Spread(call.ranks, block)
    rows = spread.count(sizes.keys, 0)
    for number in range(call.ranks):
        at = spread.positions(rows, number, CPU).numpy()
        counts = spread.counts(torch.from_numpy(tensors["kv_len"]), number).numpy()
        own = {
            "key_at": at,
            "key_count": counts,
            "keys_all": np.asarray(spread.longest(rows, number)),
            "head_first": np.asarray(0),
            "kv_heads_all": np.asarray(HEADS // GROUP),
        }
        inputs = {
            **{item.name: tensors[item.tensor] for item in rank.derived.inputs if isinstance(item, View)},
            **{item: own[item] for item in rank.derived.inputs if not isinstance(item, View)},
        }
        shape = sizes.batch, HEADS, sizes.queries, rows
        there = at < sizes.keys
        found = rank.values(rank.attention.mask, inputs, shape) & (
            np.arange(rows) < counts[:, None, None, None]
        )
        assert not found[..., ~there].any()
        assert np.array_equal(found[..., there], seen[..., at[there]] == 1)
        given_, wanted = rank.values(rank.attention.score, inputs, shape)[..., there], scores[..., at[there]]
        assert np.array_equal(given_[found[..., there]], wanted[found[..., there]], equal_nan=True)


def more_queries_than_keys(plan: Plan, rows: npt.NDArray[np.int64]) -> bool:
    """Whether a packed sequence of one of these rows has."""
    ends_q, ends_k = plan.sizes.ends_q, plan.sizes.ends_k
    if ends_q is None or ends_k is None:
        return False
    sequence = np.searchsorted(ends_q, rows, "right") - 1
    return bool((np.diff(ends_q) > np.diff(ends_k))[sequence].any())


@settings(max_examples=min(settings().max_examples, 100) // 4)
@example(FAR, Const(1.5), None)
@example(ENDED, spell("time[b, h]"), None)
@given(calls(), floats(), st.sampled_from((None, *STRATEGIES)))
def test_a_rank_sees_what_its_rows_see(call: Call, bias: Expr, strategy: Strategy | None) -> None:
    """Mask and scores, of every rank, part and head."""
    check_ranks(call, bias, strategy)


APART = (
    spell("kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"),
    spell("kv_idx > q_pos and stamp[b, kv_idx] == stamp[b, q_pos]"),
    spell("kv_idx <= q_pos"),
    spell("kv_idx <= 0 or kv_idx == q_pos"),
    spell("q_pos - 20 <= kv_idx and kv_idx <= q_pos"),
)


@settings(max_examples=min(settings().max_examples, 90) // 3)
@given(
    calls(queries=(97, 130, 200)),
    st.sampled_from(APART),
    st.sampled_from(("time[b, h]", "time[b, kv_idx]", "bias[h, q_idx, kv_idx]")),
    st.integers(0, 2**16),
)
def test_a_rank_sees_the_same_without_tiles_that_none_of_its_rows_sees(
    call: Call, mask: Expr, bias: str, seed: int
) -> None:
    """Chunks given to ranks at random, tiles of 16 keys."""

    def owners(chunks: Chunks, ranks: int, *_: object) -> dict[str, npt.NDArray[np.int64]]:
        return {"any": np.random.default_rng(seed).integers(0, ranks, len(chunks.work))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnc.distributed.plan.TILE", 16)
        patch.setattr("attnc.distributed.plan._APART", 32)
        patch.setattr("attnc.distributed.plan.assignments", owners)
        check_ranks(replace(call, mask=mask), spell(bias), "need")


def check_ranks(call: Call, bias: Expr, strategy: Strategy | None) -> None:
    sizes = call.sizes
    try:
        program = program_of(spec_of(call, Binary("+", Dot(), bias)))
        attention = program.attentions[0]
        if (sizes.ends_q is None) != (sizes.ends_k is None):
            with pytest.raises(DiagnosticError, match="packed keys with queries that are not packed"):
                check_covered(attention)
            return
        rank = Rank(derive(program, attention, {}, "triton"))
        plan = Planner(Visibility(attention), Widths(d=16, dv=16), call.ranks).plan(call.sizes, strategy)
    except (DiagnosticError, ValueError):
        reject()
    seen, scores = whole(call, attention.mask), whole(call, attention.score)
    for number in range(call.ranks):
        for part in plan.parts(number):
            rows, keys = plan.rows(number)[part.rows], part.keys
            if more_queries_than_keys(plan, rows):
                with pytest.raises(ValueError, match="more queries than keys"):
                    tables_of(plan, attention, rows, part.lo, CPU)
                continue
            tables = tables_of(plan, attention, rows, part.lo, CPU, part.kept)
            for group in range(plan.chosen.groups):
                first, heads = (n * GROUP for n in plan.heads(number, group))
                shape = len(seen), heads, len(rows), len(keys)
                inputs = inputs_of(rank.derived, call, plan, part, tables, first, heads)
                found = rank.values(rank.attention.mask, inputs, shape)
                at = np.s_[:, first : first + heads, rows[:, None], keys]
                assert np.array_equal(found, seen[at] == 1)
                assert np.array_equal(
                    rank.values(rank.attention.score, inputs, shape)[found], scores[at][found], equal_nan=True
                )


SEVERAL = (
    text().partition("schedule")[0]
    + """
attention other {
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  score = dot(q, k)
  normalize = softmax
  output o: f32[B, M, H, 16]
}
schedule other for triton { tile.q = 16, tile.kv = 128 }
schedule small for cuda.sm_80 { tile.kv = 128 }
schedule small for triton as split { loops = [kv], tile.q = 16, tile.kv = 32, split.kv = auto }
schedule small for triton as rows { tile.q = 16, tile.kv = 64 }
schedule small for triton as wide { tile.q = 32, tile.kv = 64 }
"""
)


@pytest.mark.parametrize(
    ("target", "form", "label", "expected"),
    [
        ("triton", "rows", None, "tile.q = 16, tile.kv = 64"),
        ("triton", "keys", None, "split.kv = auto"),
        ("triton", "rows", "wide", "tile.q = 32"),
        ("triton", "rows", "split", "split.kv = auto"),
        ("cuda.sm_80", "rows", None, "tile.kv = 128"),
        ("cuda.sm_80", "keys", None, "tile.kv = 128"),
    ],
)
def test_ranks_run_the_schedule_that_suits(target: str, form: Form, label: str | None, expected: str) -> None:
    """The first of the form, of this attention and target, or the one that is named."""
    program = program_of(SEVERAL)
    derived = derive(program, program.attention("small"), {}, target, form, label)
    (schedule,) = derived.text.split("schedule ")[1:]
    assert schedule.startswith(f"small for {target} {{")
    assert expected in schedule


def test_a_target_without_a_schedule_is_named() -> None:
    program = program_of(SEVERAL)
    for target, label, said in (("cuda.sm_90a", None, "cuda.sm_90a"), ("triton", "tall", "triton as tall")):
        with pytest.raises(DiagnosticError) as refused:
            derive(program, program.attention("small"), {}, target, "rows", label)
        (problem,) = refused.value.diagnostics
        assert problem.code == "E0602"
        assert problem.message == f"'small' has no schedule for {said}, which ranks would run"
        assert f"schedule small for {said}" in problem.hints[0]


JOINED = """attention joined {
  input q: bf16[B, M, G, 512]
  input k: e4m3[B, N, 1, 448] via paged(block_table, page = 64)
  input v: bf16[B, N, 1, 512] via prefix(k)
  input rope: bf16[R, 64, 64]
  input block_table: i32[B, P]
  input kv_len: i32[B]
  length N = kv_len[b]
  let page = block_table[b, kv_idx // 64]
  score = dot(q, cat(k, rope[page, kv_idx % 64, d])) / sqrt(512)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, G, 512]
}
schedule joined for cuda.sm_90a {
  loops = [kv], pack = gqa
}
"""


def test_columns_behind_those_of_k_are_refused_where_they_stand() -> None:
    """A derived spec has no 'cat': without its columns q and k would differ."""
    program = program_of(JOINED)
    with pytest.raises(DiagnosticError) as refused:
        derive(program, program.attentions[0], {}, "cuda.sm_90a", "keys")
    (problem,) = refused.value.diagnostics
    assert problem.message == "'cat' of k and rope is not shared out over ranks"
    assert problem.primary.span.text.startswith("rope[")


@pytest.mark.parametrize("lse", ["", "output lse: f32[B, Hkv * G, M]"])
@pytest.mark.parametrize("form", ["rows", "keys"])
def test_a_rank_gives_lse_of_every_row_and_head(lse: str, form: Form) -> None:
    """Whatever the spec has: parts are joined by it."""
    spec = text(length="length N = kv_len[b]", inputs=("kv_len: i32[B]",))
    program = program_of(spec.replace("output lse: f32[B, Hkv * G, M]", lse))
    derived = derive(program, program.attentions[0], {}, "triton", form)
    o, found = program_of(derived.text).attentions[0].outputs
    assert sorted(found.roles) == sorted(o.roles[:-1])
    assert found.dtype == DType.F32
    assert o.dtype == DType.F32


_LENGTH = "length N = kv_len[b]"
#: Sums and floats that are compared, axes that end, packed rows by their numbers, names that are taken, and
#: what is counted from the first head or key.
TELLING = {
    **{name: SPECS[name] for name in ("documents", "prefix", "sink", "distances", "types", "packed")},
    "floats": text(
        "causal and time[b, kv_idx] <= time[b, q_pos] + slope[h]",
        inputs=("time: f32[B, N]", "slope: f32[H]"),
        heads="H",
    ),
    "sums": text(
        "2 * kv_idx + tag[b] <= q_pos + tag[b] + 3 and q_pos != kv_idx + 7", inputs=("tag: i32[B]",)
    ),
    "ends": text(
        "doc[b, 7] <= q_pos",
        score="dot(q, k) + bias[h, q_idx, kv_idx] + own[b, q_idx]",
        inputs=("doc: i32[B, N] is sorted", "bias: f32[H, M, N]", "own: f32[B, M]", "kv_len, q_len: i32[B]"),
        length=f"{_LENGTH}\n  length M = q_len[b]",
        heads="H",
    ),
    "packed numbers": text(
        "kv_idx < N - 3 and q_idx < M",
        score="dot(q, k) + bias[h, q_idx, kv_idx] + own[b, q_idx] + slope[h] * q_pos",
        inputs=("bias: f32[H, M, N]", "own: f32[B, M]", "slope: f32[H]"),
        heads="H",
        packed=True,
    ),
    "names": text(
        "row_at[b] <= kv_idx and row_at_2[b] <= q_pos and doc[b, kv_idx] == doc[b, q_pos]",
        inputs=("row_at, row_at_2: i32[B]", "doc: i32[B, N]"),
    ),
    "first of head": text(
        score="dot(q, k) + sink[h] * (N - kv_idx)",
        inputs=("kv_len: i32[B]", "sink: f32[H]", "p: f32[]", "seed: i64[]"),
        length=_LENGTH,
        normalize="softmax(sink = sink[h], dropout = p, seed = seed)",
        grads=", sink",
        heads="H",
    ),
}


def test_what_a_rank_runs_is_as_written_down(golden: Callable[[Path, str], None]) -> None:
    """Not only the same in what it computes: a mask that says it in another way hides its blocks."""
    said = list[str]()
    for name, spec in TELLING.items():
        program = program_of(spec)
        attention = program.attentions[0]
        point: dict[str, Any] = {param.name: DType.BF16 for param in attention.params}
        forms: tuple[Form, ...] = ("rows", "keys") if "N" in attention.lengths else ("rows",)
        for form in forms:
            made = derive(program, attention, point, "triton", form)
            views = [item for item in made.inputs if isinstance(item, View)]
            said += [
                f"# {name}, {form}",
                made.text.partition("\nschedule")[0].rstrip(),
                *(f"# {view.name} is {view.tensor}[{', '.join(view.kinds)}]" for view in views),
                "",
            ]
    golden(GOLDEN / "ranks" / "derived.txt", "\n".join(said))
