"""Which blocks and queries a program finds that makes dk and dv of blocks, packed and not."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.target.triton.render import text_of
from attnc.target.triton.selected_blocks import BlockParameters, BlockText
from tests.plan.test_selected import planned
from tests.verify.judging import modules_of

SPEC = """attention packed {{
  input q: bf16[T, Hkv * G, 64] via ragged(cu)
  input k, v: bf16[{keys}
  input cu, ck: i32[B + 1]
  input idx: i32[{lists}, S]
  score = dot(q, k) / 8
  mask = listed(idx, rows = {rows}, keys = 48)
  normalize = softmax
  output o: bf16[T, Hkv * G, 64]
  grad k, v
}}
schedule packed for triton {{
  loops = [kv], pack = gqa
}}
"""
PACKED, APART = "U, Hkv, 64] via ragged(ck)", "B, N, Hkv, 64]"


def module_of(keys: str = PACKED, lists: str = "T, Hkv", rows: int = 1) -> Module:
    (module,) = modules_of(SPEC.format(keys=keys, lists=lists, rows=rows))
    return module


def blocks_of(module: Module) -> BlockText:
    text = text_of(module, module.backward_kernels["dkdv"])
    assert isinstance(text, BlockText)
    return text


def programs_of(text: BlockText) -> str:
    assert isinstance(text.parameters, BlockParameters)
    return text.parameters.programs


def test_ordinary_blocks_are_counted_by_sequences() -> None:
    text = blocks_of(planned(keys=48))
    assert programs_of(text) == "list_blocks * cdiv(48, BLOCK_N) * B * Hkv"
    assert text.find_list[-1] == "listed = _list_length(list_row, list_line >= 0)"
    assert not text.lists_packed_rows


def test_packed_blocks_are_counted_over_all_sequences() -> None:
    """A sequence has a number more than whole blocks: none of its keys has it, and no list is read there."""
    text = blocks_of(module_of())
    assert text.block_count == "U // 48 + B + 1"
    assert programs_of(text) == "(U // 48 + B + 1) * cdiv(48, BLOCK_N) * Hkv"
    assert text.find_list[-1] == "listed = _list_length(list_row, (list_line >= 0) & (kv_lo < N_all))"


@pytest.mark.parametrize("keys", [PACKED, APART])
def test_entries_of_packed_queries_are_rows_of_all_sequences(keys: str) -> None:
    text = blocks_of(module_of(keys))
    assert text.lists_packed_rows
    assert text.find_rows("place")[-1] == "q_idx = tl.where(row < stop, entry - q_first, M)"


def test_entries_of_lists_of_each_sequence_are_its_own() -> None:
    text = blocks_of(module_of(lists="B, R", rows=4))
    assert not text.lists_packed_rows
    assert text.find_rows("place")[-1] == "q_idx = tl.where(row < stop, entry * 4 + row // G % 4, M)"


def test_dq_of_packed_queries_is_made_where_no_one_asks_for_it() -> None:
    """Its kernel leaves delta and lse of rows, of which each program finds the sequence."""
    assert [*module_of().backward_kernels] == ["dq", "dkdv"]
