"""What is not shared out over ranks, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.distributed import ContextParallel
from attnc.distributed.group import Alone
from attnc.verify.interpreter import ensure_interpreter
from tests.distributed.specs import SPECS, text
from tests.distributed.threads import on_ranks

ensure_interpreter()


def test_keys_of_8_bits_are_refused() -> None:
    narrow = text(dtype="bf16").replace("input k, v: bf16", "input k, v: e4m3").replace("grad q, k, v", "")
    cp = ContextParallel(narrow, Alone())
    q, k = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 8, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(DiagnosticError) as failure:
        cp.shard(q, k, k)
    assert [d.code for d in failure.value.diagnostics] == ["E0602", "E0602"]
    assert failure.value.diagnostics[0].message == "k of e4m3 is not shared out over ranks by rows"


def test_scales_of_columns_are_refused() -> None:
    spec = text(dtype="bf16", inputs=("ks: f32[N, 2]",)).replace("grad q, k, v", "")
    cp = ContextParallel(spec.replace("dot(q, k)", "dot(q, k * ks[kv_idx, d // 8])"), Alone())
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(DiagnosticError) as failure:
        cp.shard(q, q, q)
    assert failure.value.diagnostics[0].message == "a scale of columns of k is not shared out over ranks"


def test_an_order_of_sums_is_refused() -> None:
    """Ranks join what they have of a row as it comes, whatever the spec says."""
    spec = text(normalize="softmax\n  order = absolute(64)")
    q = torch.zeros(1, 8, 2, 16)
    with pytest.raises(DiagnosticError) as failure:
        ContextParallel(spec, Alone()).shard(q, q, q)
    assert failure.value.diagnostics[0].message == "'order = absolute' is not kept over ranks"


@pytest.mark.parametrize(
    ("q", "k", "packed"),
    [
        ("[T, H, 16] via ragged(starts)", "[B, N, H, 16]", "packed queries with keys"),
        ("[B, M, H, 16]", "[S, H, 16] via ragged(starts)", "packed keys with queries"),
    ],
)
def test_rows_that_lie_in_two_ways_are_said_where_they_are_packed(q: str, k: str, packed: str) -> None:
    spec = f"""
attention small {{
  input q: f32{q}
  input k, v: f32{k}
  input starts: i32[B + 1]
  score = dot(q, k)
  mask = true
  normalize = softmax
  output o: f32{q.partition(" via")[0]}
}}
schedule small for triton {{
  tile.q = 16, tile.kv = 16
}}
"""
    with pytest.raises(DiagnosticError) as failure:
        ContextParallel(spec, Alone()).kernels_for(torch.zeros(1, 8, 2, 16))
    (found,) = (d for d in failure.value.diagnostics if "packed" in d.message)
    assert found.message == f"{packed} that are not packed are not shared out over ranks"
    assert found.primary.span.text == "ragged(starts)"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (3, {}, TypeError, "source: expected a generated function, a spec or its path, got int"),
        (print, {}, TypeError, "source: expected a generated function, .* got <built-in function print>"),
        (SPECS["causal"], {"strategy": "ring"}, ValueError, "strategy: expected one of .*, got 'ring'"),
        (SPECS["causal"], {"sum": False}, TypeError, "sum: no param of the spec, which has none"),
    ],
)
def test_what_no_ranks_can_share_out(
    source: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, lambda group: ContextParallel(source, group, **options))
