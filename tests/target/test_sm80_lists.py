"""What the CUDA kernel that makes bits of lists says: which list is whose, and what memory it fills."""

from __future__ import annotations

import re

import pytest

from attnc.target.sm80.lists import LIST_THREADS, CudaListsText
from attnc.target.sm90.backward_tiles import Sm90Arguments
from tests.target.listing import AXES, SIZES, listing, places


def text_of(
    axes: str = "B, H, R, S", *, count: str = "", dtype: str = "i32", inverts: bool = True
) -> CudaListsText:
    module = listing(axes, target="cuda.sm_90a", count=count, dtype=dtype)
    assert module.lists is not None
    return CudaListsText(module, module.lists, Sm90Arguments(module).dtypes, inverts=inverts)


def indices_of(text: CudaListsText, line: int) -> dict[str, int]:
    """What the statements that take `line` apart leave in their names, of integers of C++."""
    names = {**SIZES, "line": line}
    for statement in text.indices:
        found = re.findall(r"(\w+) = ([^,;]+)[,;]", statement)
        assert found
        for name, value in found:
            names[name] = eval(value.replace("args.", "").replace("/", "//"), {}, names)
    return names


@pytest.mark.parametrize(("axes", "row_axis"), AXES.items())
def test_the_number_of_a_list_is_taken_apart_into_its_indices(axes: str, row_axis: int) -> None:
    text = text_of(axes)
    assert text.row == f"i_{row_axis}"
    groups = sorted({place[:row_axis] + place[row_axis + 1 :] for place in places(axes)})
    for line, place in enumerate(places(axes)):
        names = indices_of(text, line)
        assert tuple(names[f"i_{axis}"] for axis in range(len(place))) == place
        group = text.group.replace("(long long)", "").replace("args.", "").replace("0ll", "0")
        others = place[:row_axis] + place[row_axis + 1 :]
        assert eval(group, {}, names) == groups.index(others)


def test_the_group_of_lists_has_64_bits() -> None:
    assert text_of().group == "(long long)(i_0 * args.H + i_1)"
    assert text_of("R, S").group == "0ll"


@pytest.mark.parametrize(("dtype", "entry"), [("i32", "int"), ("i64", "long long")])
def test_entries_are_of_the_type_of_the_list(dtype: str, entry: str) -> None:
    text = text_of(dtype=dtype)
    assert text.entry == entry
    assert next(text.fields) == f"const {entry}* idx_ptr;"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("", "args.S"),
        (
            "R",
            (
                "*(args.cnt_ptr + i_0 * args.stride_cnt_0) < args.S"
                " ? (int)*(args.cnt_ptr + i_0 * args.stride_cnt_0) : args.S"
            ),
        ),
    ],
)
def test_no_more_entries_count_than_there_are(count: str, expected: str) -> None:
    assert text_of("R, S", count=count).count == expected


def test_arguments_are_the_lists_their_counts_and_the_bits() -> None:
    assert list(text_of("R, S", count="R").fields) == [
        "const int* idx_ptr;",
        "const int* cnt_ptr;",
        "int* _list_bits_ptr;",
        "int* _row_bits_ptr;",
        "long long stride_idx_0, stride_idx_1;",
        "long long stride_cnt_0;",
        "int R, S, list_blocks, list_rows;",
    ]


def test_a_block_of_threads_reads_a_list_and_sets_bits_of_32_blocks_a_word() -> None:
    text = text_of("B, R, H, S")
    assert text.lines == "(B) * (R) * (H)"
    assert text.allocations == {
        "_list_bits": "(B) * (R) * (H) * cdiv(list_blocks, 32)",
        "_row_bits": "(B) * (H) * list_blocks * cdiv(list_rows, 32)",
    }
    assert text.launch.values == ['"under_test_backward_lists"', '"(B) * (R) * (H)"']
    assert f"'WARPS': '\"{LIST_THREADS // 32}\"'" in str(text.launch)


def test_the_kernels_of_a_forward_and_a_backward_have_names_of_their_own() -> None:
    assert [text_of(inverts=inverts).name for inverts in (False, True)] == [
        "under_test_lists",
        "under_test_backward_lists",
    ]
