"""Where rows lie in the kernels of a backward, as text."""

from __future__ import annotations

from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward_rows import BackwardRows
from tests.plans import module_of


def rows_of(spec: str, kernel: str, variant: str | None = None) -> BackwardRows:
    module = module_of(spec, "cuda.sm_80", variant)
    planned = next(item for item in module.backward_kernels.values() if item.kind == kernel)
    return BackwardRows(ArgumentText(module).tensors, planned)


def test_rows_of_queries_and_keys_lie_behind_their_own_heads() -> None:
    rows = rows_of("gated", "dq")
    assert rows.kv_name == "h_kv"
    assert rows.head_offset("q") == "b * args.stride_qb + h * args.stride_qh"
    assert rows.head_offset("k") == "b * args.stride_kb + h_kv * args.stride_kh"
    assert (rows.stride("dq"), rows.stride("dk")) == ("stride_dqm", "stride_dkn")


def test_packed_sequences_have_padded_rows_of_lse() -> None:
    assert rows_of("gated", "dq").first == "(long long)(b * H + h) * args.M_padded"
    assert "(q_first / args.ROW_TILE + sequence)" in rows_of("varlen", "dq").first
