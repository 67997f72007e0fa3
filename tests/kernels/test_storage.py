"""Pages and packed sequences: every storage against the reference, and bitwise against contiguous rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from attnc.model.resolve import resolve
from attnc.model.tensors import Paged
from attnc.runtime.trial import problem_for, trial
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.dispatch import render_dispatch
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.strategies import far, locates_rows
from attnc.verify.subject import Subject, subject_of
from tests.plans import plans_of
from tests.verify.judging import assert_within_bound, every_fill, modules_of, subject_of_text, transposed

SCHEDULE = "schedule a for triton { tile.q = 16, tile.kv = 32, warps = 4, stages = 2 }"
MATHS = """
  score = dot(q, k) / sqrt(D)
  mask = {mask}
  normalize = softmax{softmax}
"""


def subject(
    q: str, kv: str, extras: str, o: str, *, mask: str = "causal", softmax: str = "", schedule: str = SCHEDULE
) -> Subject:
    """The one variant of an attention over these declarations, in f16."""
    text = f"""attention a {{
  input q: f16{q}
  {kv}
  {extras}
  {MATHS.format(mask=mask, softmax=softmax)}
  output o: f16{o}
  output lse: f32{lse_of(o)}
}}
{schedule}
"""
    return subject_of_text(text)


def lse_of(o: str) -> str:
    return o.rsplit(",", 1)[0] + "]"


def paged(page: int, layout: str = "[B, N, Hkv, 16]", **named: str) -> Subject:
    return subject(
        "[B, M, Hkv * G, 16]",
        f"input k, v: f16{layout} via paged(table, page = {page})",
        "input table: i32[B, P]\n  input kv_len: i32[B]\n  length N = kv_len[b]",
        "[B, M, Hkv * G, 16]",
        **named,
    )


DIMS = {"B": 2, "M": 3, "N": 70, "Hkv": 2, "G": 3}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("page", [1, 3, 16, 32, 48, 64, 256])
def test_every_page_size(page: int) -> None:
    assert_within_bound(paged(page), Case(dims=DIMS, seed=page), fills=every_fill())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["[B, Hkv, N, 16]", "[N, B, Hkv, 16]"])
def test_pages_of_any_layout(layout: str) -> None:
    made = paged(16, layout)
    for layouts in ({}, transposed(made.variant.attention)):
        assert_within_bound(made, Case(dims=DIMS, seed=5, layouts=layouts), fills=every_fill())


def test_a_pool_may_span_more_than_the_machine_has() -> None:
    made, dims = paged(16), {**DIMS, "N": 270}
    attention = made.variant.attention
    for tensor in (attention.k, attention.v):
        layout = far(attention, tensor, dims)
        assert layout is not None
        assert_within_bound(made, Case(dims=dims, seed=3, layouts={tensor.name: layout}))


def test_a_sequence_is_as_long_as_its_pages() -> None:
    """No case has one length in the place of all, for which some have too few pages."""
    attention = paged(16).variant.attention
    found = [tensor.name for tensor in attention.inputs if locates_rows(attention, tensor)]
    assert found == ["k", "v", "table", "kv_len"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mask", ["true", "window(20, 3)", "chunk(16)", "q_pos + h >= kv_idx"])
@pytest.mark.parametrize("dims", [{"M": 1}, {"M": 17}, {"N": 0}, {"N": 1, "M": 2}], ids=str)
def test_masks_over_pages(mask: str, dims: Mapping[str, int]) -> None:
    assert_within_bound(paged(16, mask=mask), Case(dims={**DIMS, **dims}, seed=1), fills=("nan", "large"))


def packed(
    shared: bool = False,
    *,
    mask: str = "causal",
    softmax: str = "",
    extras: str = "",
    schedule: str = SCHEDULE,
) -> Subject:
    """Packed queries against packed keys; shared: the rows of both are those of the same sequences."""
    rows, cu = ("T", "cu_q") if shared else ("S", "cu_k")
    return subject(
        "[T, Hkv * G, 16] via ragged(cu_q)",
        f"input k, v: f16[{rows}, Hkv, 16] via ragged({cu})",
        f"input cu_q{'' if shared else ', cu_k'}: i32[B + 1]\n  {extras}",
        "[T, Hkv * G, 16]",
        mask=mask,
        softmax=softmax,
        schedule=schedule,
    )


@pytest.mark.one_in(12)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shared", [False, True], ids=["two", "self"])
def test_packed_sequences(seed: int, shared: bool) -> None:
    dims = {"B": 3, "M": 20, "N": 37, "Hkv": 1, "G": 2}
    dims = {name: size for name, size in dims.items() if name != "N" or not shared}
    assert_within_bound(packed(shared=shared), Case(dims=dims, seed=seed), fills=every_fill())


def test_many_packed_sequences() -> None:
    """More sequences than one round of the search looks at."""
    dims = {"B": 150, "M": 3, "N": 5, "Hkv": 1, "G": 1}
    assert_within_bound(packed(), Case(dims=dims, seed=3))


def test_rows_behind_the_last_sequence_have_no_sink() -> None:
    made = packed(softmax="(sink = sink[h])", extras="input sink: f32[Hkv * G]")
    for seed in range(4):
        case = Case(dims={"B": 2, "M": 5, "N": 9, "Hkv": 1, "G": 2}, seed=seed)
        assert_within_bound(made, case, fills=every_fill())


def test_no_sequences() -> None:
    made = packed()
    q, k = torch.ones(3, 2, 16, dtype=torch.float16), torch.ones(0, 1, 16, dtype=torch.float16)
    o, lse = made.module.a(q, k, k, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_values_that_are_a_prefix_of_the_keys() -> None:
    made = subject(
        "[B, M, G, 48]",
        "input k: f16[B, N, 1, 48] via paged(table, page = 16)\n  input v: f16[B, N, 1, 32] via prefix(k)",
        "input table: i32[B, P]\n  input kv_len: i32[B]\n  length N = kv_len[b]",
        "[B, M, G, 32]",
    )
    dims = {"B": 2, "M": 2, "N": 50, "G": 3}
    for seed in (0, 1):
        assert_within_bound(made, Case(dims=dims, seed=seed), fills=every_fill())


def test_packed_values_that_are_a_prefix_of_the_keys() -> None:
    made = subject(
        "[T, G, 48] via ragged(cu_q)",
        "input k: f16[S, 1, 48] via ragged(cu_k)\n  input v: f16[S, 1, 32] via prefix(k)",
        "input cu_q, cu_k: i32[B + 1]",
        "[T, G, 32]",
    )
    for seed in (0, 1):
        assert_within_bound(made, Case(dims={"B": 3, "M": 2, "N": 50, "G": 3}, seed=seed), fills=every_fill())


def test_rows_past_a_length_are_empty() -> None:
    made = subject(
        "[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "input q_len: i32[B]\n  length M = q_len[b]",
        "[B, M, H, 16]",
        softmax="(sink = 0.5)",
    )
    for seed in range(3):
        assert_within_bound(made, Case(dims={"B": 2, "M": 40, "N": 40, "H": 1}, seed=seed))


def test_values_at_the_end_of_a_sequence_are_those_at_its_own_end() -> None:
    made = subject(
        "[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "input kv_len: i32[B]\n  input segment: i32[B, N]\n  input level: i32[N]\n  length N = kv_len[b]",
        "[B, M, H, 16]",
        mask="causal and segment[b, kv_idx + 1] >= level[N - 1]",
    )
    for seed in range(3):
        assert_within_bound(made, Case(dims={"B": 2, "M": 40, "N": 40, "H": 1}, seed=seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", [5, 16, 64])
def test_pages_equal_contiguous_rows_bitwise(page: int) -> None:
    """Whatever the pages' order: the plan is the same, so every rounding is."""
    torch.manual_seed(page)
    n, pages = 100, -(-100 // page)
    k, v = torch.randn(2, 2, n, 2, 16).half()
    q = torch.randn(2, 3, 4, 16).half()
    dense = subject(
        "[B, M, Hkv * G, 16]", "input k, v: f16[B, N, Hkv, 16]", "", "[B, M, Hkv * G, 16]"
    ).module.a(q, k, v)
    order = torch.randperm(2 * pages).reshape(2, pages).to(torch.int32)
    pools = torch.full((2, 2 * pages, page, 2, 16), torch.nan).half()
    for b in range(2):
        for column in range(pages):
            for pool, rows in zip(pools, (k, v), strict=True):
                part = rows[b, column * page : (column + 1) * page]
                pool[order[b, column], : len(part)] = part
    length = torch.full((2,), n, dtype=torch.int32)
    found = paged(page).module.a(q, *pools, order, length)
    for one, other in zip(found, dense, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["paged_decode", "varlen"])
def test_a_realistic_problem_can_be_made(name: str) -> None:
    """What `attnc demo` and `attnc tune` run."""
    module = plans_of(name).modules[0]
    ensure_interpreter()
    problem = problem_for(module, 40, device="cpu", tokens=80)
    result = trial(module, problem)()
    assert isinstance(result, tuple)
    assert all(bool(tensor.isfinite().all()) for tensor in result)


def test_the_size_of_a_page_may_be_a_param() -> None:
    """Each choice is a variant, which the function of the family reads off the pages it is given."""
    text = f"""attention a {{
  param P in {{3, 16}}
  input q: f16[B, M, H, 16]
  input k, v: f16[B, H, N, 16] via paged(table, page = P)
  input table: i32[B, X]
  input kv_len: i32[B]
  length N = kv_len[b]
  {MATHS.format(mask="causal", softmax="")}
  output o: f16[B, M, H, 16]
}}
{SCHEDULE}
"""
    modules = modules_of(text)
    assert [(module.variant.name, module.variant.attention.k.storage) for module in modules] == [
        (f"p{page}", Paged(block_table="table", page=page)) for page in (3, 16)
    ]
    for module in modules:
        assert_within_bound(subject_of(module), Case(dims={"B": 2, "M": 3, "N": 37, "H": 1}, seed=3))
    (attention,) = resolve(parse(Source("a.attn", text)), prelude()).attentions
    assert "k.shape[2]" in render_dispatch(attention, modules, "a.attn")
