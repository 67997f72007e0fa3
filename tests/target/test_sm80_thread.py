"""The rows that a thread has, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Forward
from attnc.target.sm80.thread import ThreadRows
from tests.plans import module_of


def rows(spec: str, **fields: str) -> ThreadRows:
    module = module_of(spec, "cuda.sm_80")
    kernel = module.kernel
    assert isinstance(kernel, Forward | Decode)
    dtypes = {arg.tensor.name: DType(arg.tensor.dtype) for arg in module.args}
    computed = (*kernel.program, *kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches)
    found = ThreadRows(kernel=kernel, dtypes=dtypes, computed=computed, split="q", row="8 * r + g")
    return replace(found, **fields)  # type: ignore[arg-type]  # fields of text


def test_positions_are_kept_only_where_something_reads_them() -> None:
    assert rows("causal_gqa").values == "q_idx[ROWS], q_pos[ROWS]"
    assert rows("full").values == ""


def test_rows_of_a_group_of_heads_have_a_query_and_a_head_each() -> None:
    packed = rows("causal_gqa", tile="row_lo", group="G", first_head="h_kv * G + ")
    assert packed.q_idx == "(row_lo + 8 * r + g) / G"
    assert packed.head == "h_kv * G + (row_lo + 8 * r + g) % G"
    assert (rows("causal_gqa").q_idx, rows("causal_gqa").head) == ("q_lo + 8 * r + g", "h")


@pytest.mark.parametrize(
    ("split", "first", "first_key", "writer"),
    [("q", "warp * WARP_M", "0", "t == 0"), ("kv", "0", "warp * WARP_N", "warp == 0 && t == 0")],
)
def test_warps_share_rows_or_keys(split: str, first: str, first_key: str, writer: str) -> None:
    found = rows("causal_gqa", split=split)
    assert (found.first, found.first_key, found.writer) == (first, first_key, writer)


def test_one_thread_of_the_first_split_begins_with_the_sink() -> None:
    found = replace(rows("local_sink"), is_split=True, lane="consumer == 0 && ")
    assert found.first_lane == "consumer == 0 && t == 0 && split == 0"
    assert found.first_m.startswith("split == 0 ? ")
    assert found.first_m.endswith(" : -INF")
