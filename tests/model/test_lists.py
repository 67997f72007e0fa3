"""What condition a call of `listed` becomes, and what is no list."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import InList, show
from attnc.model.lists import MAX_BLOCK
from tests.model.resolving import attention_of, errors_of, plain


def condition_of(lists: str, mask: str) -> InList:
    made = attention_of(plain(f"input {lists}", mask=mask)).mask
    assert isinstance(made, InList)
    return made


def shown(lists: str, mask: str) -> str:
    """The indices of the list, by what its axes are."""
    return ", ".join(show(index) for index in condition_of(lists, mask).indices)


def error_of(lists: str, mask: str) -> str:
    (error,) = errors_of(plain(f"input {lists}", mask=mask))
    return f"{error.code} {error.message}: {error.primary.text}"


@pytest.mark.parametrize(
    ("axes", "options", "indices"),
    [
        ("B, Hkv, R, S", "rows = 32, keys = 48", "b, h // G, q_idx // 32"),
        ("B, Hkv * G, R, S", "rows = 32, keys = 48", "b, h, q_idx // 32"),
        ("R, B, S", "rows = 16, keys = 16", "q_idx // 16, b"),
        ("B, 1, R, S", "rows = 64, keys = 64", "b, 0, q_idx // 64"),
        ("B, M, S", "rows = 1, keys = 1", "b, q_idx // 1"),
        ("B, Hkv, S", "keys = 32", "b, h // G"),
        ("S", "keys = 32", ""),
    ],
)
def test_axes_have_indices_by_what_they_are(axes: str, options: str, indices: str) -> None:
    assert shown(f"idx: i32[{axes}]", f"listed(idx, {options})") == indices


@pytest.mark.parametrize(
    ("axes", "rows", "index"),
    [("R, S", 32, "q_idx // 32"), ("T, S", 1, "(cu[b] + q_idx) // 1")],
    ids=["blocks of each sequence", "rows of all sequences"],
)
def test_packed_queries_have_lists_by_sequence_or_by_row(axes: str, rows: int, index: str) -> None:
    text = plain(
        f"input cu: i32[B + 1]\n  input idx: i32[{axes}]", mask=f"listed(idx, rows = {rows}, keys = 48)"
    )
    text = text.replace("q: bf16[B, M, Hkv * G, D]", "q: bf16[T, Hkv * G, D] via ragged(cu)")
    made = attention_of(text.replace("o: bf16[B, M,", "o: bf16[T,")).mask
    assert isinstance(made, InList)
    assert [show(found) for found in made.indices] == [index]


def test_an_entry_names_a_block_of_keys() -> None:
    made = condition_of("idx: i32[B, Hkv, R, S]", "listed(idx, rows = 32, keys = 48)")
    assert (made.tensor, made.keys, show(made.entry), made.limit) == ("idx", 48, "kv_idx // 48", None)
    assert [show(size) for size in made.extents] == ["B", "Hkv", "R", "S"]


@pytest.mark.parametrize(
    ("count", "limit"),
    [("cnt", "cnt[b, h // G, q_idx // 32]"), ("top", "top"), ("3", "3"), ("few[b]", "few[b]")],
)
def test_a_count_is_of_each_list_or_an_expression(count: str, limit: str) -> None:
    lists = "idx: i32[B, Hkv, R, S]\n  input cnt: i32[B, Hkv, R]\n  input top: i32[]\n  input few: i32[B]"
    made = condition_of(lists, f"listed(idx, rows = 32, keys = 48, count = {count})")
    assert made.limit is not None
    assert show(made.limit) == limit


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ("listed(idx, idx, keys = 64)", "'listed' takes one list: 2 given"),
        ("listed(idx, keys = 64, keys = 64)", "'listed' has no argument 'keys' here: given twice"),
        (
            "listed(idx, rows = 64, keys = 0)",
            "'keys' is not the size of a block: must be 1 to 1,048,576, and known when the spec is compiled",
        ),
        (
            f"listed(idx, rows = {MAX_BLOCK + 1}, keys = 64)",
            "'rows' is not the size of a block: must be 1 to 1,048,576, and known when the spec is compiled",
        ),
        ("listed(k, rows = 64, keys = 64)", "a list is an input of integers: is none"),
        ("listed(idx[b, h // G, 0.5], keys = 64)", "an index of a list needs integers: this is none"),
        (
            "listed(idx, rows = 64, keys = 64, count = kv_idx)",
            "'count' is how many entries of a list count: no integer of a query",
        ),
        (
            "listed(idx, keys = 64)",
            "axes of 'idx' without a meaning: give 'rows', the queries of a block",
        ),
        (
            "listed(of_heads, rows = 64, keys = 64)",
            "'of_heads' has no axis of blocks of queries: its axes are sequences and heads",
        ),
    ],
)
def test_what_is_no_list_is_told_at_its_place(mask: str, told: str) -> None:
    """Other mistakes have goldens: `tests/golden/diagnostics/E0334_*`."""
    found = error_of("idx: i32[B, Hkv, R, S]\n  input of_heads: i32[B, Hkv, S]", mask)
    assert found == f"E0334 {told}"


def test_the_largest_block_is_one() -> None:
    assert (
        condition_of("idx: i32[B, Hkv, R, S]", f"listed(idx, rows = 1, keys = {MAX_BLOCK})").keys == MAX_BLOCK
    )
