"""What Triton's kernels that make lists ready say: which list is whose, and what memory they fill."""

from __future__ import annotations

import pytest

from attnc.target.triton.lists import ListsText
from tests.plan.planning import planned
from tests.target.listing import AXES, SIZES, listing, places


def text_of(axes: str = "B, H, R, S", *, count: str = "") -> ListsText:
    module = listing(axes, target="triton", count=count)
    assert module.lists is not None
    return ListsText(module, module.lists)


@pytest.mark.parametrize("axes", AXES)
def test_the_number_of_a_list_is_taken_apart_into_its_indices(axes: str) -> None:
    statements = list(text_of(axes).indices)
    for line, place in enumerate(places(axes)):
        names = {**SIZES, "line": line}
        exec("\n".join(statements), {}, names)
        assert tuple(names[f"i_{axis}"] for axis in range(len(place))) == place


@pytest.mark.parametrize(("axes", "row_axis"), AXES.items())
def test_a_group_of_lists_has_one_for_each_block_of_queries(axes: str, row_axis: int) -> None:
    expression = text_of(axes).line_of_row
    lines = places(axes)
    groups = sorted({place[:row_axis] + place[row_axis + 1 :] for place in lines})
    for group, others in enumerate(groups):
        for row in range(SIZES["R"]):
            line = eval(expression, {**SIZES, "group": group, "row": row})
            assert lines[line] == (*others[:row_axis], row, *others[row_axis:])


def test_addresses_are_of_64_bits() -> None:
    text = text_of("R, S")
    assert (text.offset, text.made.stride) == ("i_0.to(tl.int64) * stride_idx_0", "stride_idx_1")


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("", "S"),
        ("R", "tl.minimum(tl.load(cnt_ptr + i_0.to(tl.int64) * stride_cnt_0), S).to(tl.int32)"),
    ],
)
def test_no_more_entries_count_than_there_are(count: str, expected: str) -> None:
    text = text_of("R, S", count=count)
    assert text.count == expected
    pointers, strides, _ = text.listing_parameters
    assert ("cnt_ptr" in pointers, "stride_cnt_0" in strides) == (bool(count), bool(count))


def test_memory_is_of_each_list_and_of_each_block_of_keys() -> None:
    text = text_of("B, R, H, S")
    assert text.memory == {
        "_lists": "max((B) * (R) * (H) * (S + 1), 1)",
        "_list_bits": "max((B) * (R) * (H) * cdiv(list_blocks, 32), 1)",
        "_columns": "max((B) * (H) * list_blocks * (list_rows + 1), 1)",
    }


def test_lists_are_inverted_for_gradients_of_keys_alone() -> None:
    text = text_of()
    assert text.inverts
    grids = [(launch.fields or {})["grid"] for launch in text.launches("c")]
    assert grids == ['"max((B) * (H) * (R), 1)"', '"max((B) * (H) * cdiv(list_blocks, 4), 1)"']
    assert len(list(text.launches())) == 1

    for grads in ("", "q"):
        module = planned("listed(idx, rows = 64, keys = 64)", inputs=("idx: i32[B, H, R, S]",), grads=grads)
        assert module.lists is not None
        others = ListsText(module, module.lists)
        assert not others.inverts
        assert list(others.memory) == ["_lists"]
        assert "list_rows" not in others.sizes
