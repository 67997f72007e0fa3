"""Which loads of a mask's columns lanes share, and how each shows its own."""

from __future__ import annotations

from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90BackwardText
from tests.plan.test_sm90_backward import planned


def text_of(mask: str) -> Sm90BackwardText:
    module = planned(mask, inputs=("doc: i32[B, N] is sorted",), accumulate="two_pass")
    return Sm90BackwardText(module, Sm90Arguments(module), module.backward_kernels["dq"])


def test_integers_of_keys_are_loaded_once_by_the_warp() -> None:
    loads = text_of("doc[b, q_pos] == doc[b, kv_idx]").loads
    (shared,) = loads.shared_columns
    assert shared.load.tensor == "doc"
    assert [line.partition(" = ")[0] for line in loads.shared_column_values] == [f"{shared.name}_of[i]"]
    (shown,) = loads.column_mask_values
    assert shown == f"const int {shared.name} = shuffle({shared.name}_of[j / 4], j % 4 * 8 + 2 * t + c);"


def test_nothing_is_shared_where_a_mask_reads_no_column() -> None:
    assert text_of("kv_idx <= q_idx").loads.shared_columns == []
