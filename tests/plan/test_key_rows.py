"""Keys in pages, for gradients: kernels are those of ordinary tensors, and pages get sums of rows."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.plan.ir import Module
from attnc.plan.ir.text import module_text
from attnc.plan.key_rows import lay_in_rows
from tests.targets import EACH
from tests.verify.judging import modules_of, spec


def planned(
    *,
    storage: str = " via paged(table, page = 16)",
    grads: str = "grad q, k: f32",
    more: str = "",
    q: str = "B, M, H, 64]",
    target: str = "triton",
    schedule: str = "loops = [q, kv]",
) -> Module:
    lines = [
        f"input q: bf16[{q}",
        f"input k, v: bf16[B, N, H, 64]{storage}",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        *(["input ends: i32[B + 1]"] if "ends" in q else []),
        "length N = lens[b]" + more,
        "score = dot(q, k) / 8",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[{q.split(' via')[0]}",
        *grads.split("; "),
    ]
    (module,) = modules_of(spec(lines, schedule, target=target))
    return module


def backward_of(module: Module) -> str:
    return module_text(module).partition("\n  backward {")[2]


@pytest.mark.parametrize("target", EACH)
def test_kernels_are_those_of_ordinary_tensors(target: str) -> None:
    """To the last letter of their plans: gradients of pages are rounded once sums of rows are there."""
    paged = planned(grads="grad q, k, v", target=target)
    rows = planned(storage="", grads="grad q; grad k, v: f32", target=target)
    assert paged.key_rows is not None
    assert rows.key_rows is None
    assert paged.differentiated.variant.attention.f32_grads == ("k", "v")
    assert backward_of(paged) == backward_of(rows) != ""


def test_rows_are_of_what_lies_in_pages() -> None:
    rows = planned(grads="grad q, v; grad k: f32").key_rows
    assert rows is not None
    assert (rows.table, rows.page, show(rows.length)) == ("table", 16, "lens[b]")
    assert [arg.tensor.name for arg in rows.rows] == ["k", "v"]
    assert [show(size) for arg in rows.rows for size in arg.tensor.shape] == ["B", "N", "H", "64"] * 2
    assert not any(arg.tensor.storage.is_paged for arg in rows.args)
    assert rows.rounded == ("v",)
    assert planned(grads="grad q").key_rows is not None


def test_without_gradients_or_pages_there_are_none() -> None:
    assert planned(grads="output lse: f32[B, H, M]").key_rows is None
    assert planned(storage="").key_rows is None
    plain = planned(storage="").variant.attention
    assert lay_in_rows(plain) is plain


def test_a_length_that_counts_queries_counts_those_of_its_sequence() -> None:
    packed = planned(q="T, H, 64] via ragged(ends)", more=" + M", grads="grad q").key_rows
    assert packed is not None
    assert show(packed.length) == "lens[b] + (ends[b + 1] - ends[b])"
    of_batch = planned(more=" + M", grads="grad q").key_rows
    assert of_batch is not None
    assert show(of_batch.length) == "lens[b] + M"
    cut = planned(more=" + M\n  length M = lens[b] // 2", grads="grad q").key_rows
    assert cut is not None
    assert show(cut.length) == "lens[b] + M"


def test_a_length_behind_that_of_queries_reads_it() -> None:
    lines = [
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64] via paged(table, page = 16)",
        "input table: i32[B, P]",
        "input lens, rows: i32[B]",
        "length M = rows[b]",
        "length N = lens[b] + M",
        "score = dot(q, k) / 8",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
        "grad k",
    ]
    (module,) = modules_of(spec(lines))
    assert module.key_rows is not None
    assert show(module.key_rows.length) == "lens[b] + max(min(rows[b], M), 0)"
