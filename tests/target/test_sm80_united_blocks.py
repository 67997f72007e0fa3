"""What is printed of the kernel that makes bits of the blocks that the queries of a tile list."""

from __future__ import annotations

import re

import pytest

from attnc.model.dtypes import DType
from attnc.target.files import render_files
from attnc.target.sm80.pack import pack_of
from attnc.target.sm80.united_blocks import UnitedBlocksText
from tests.plan.test_united_blocks import PACKED, module


def text_of(**changes: str) -> UnitedBlocksText:
    made = module(**changes)
    assert made.lists is not None
    return UnitedBlocksText(made, made.lists, {arg.tensor.name: DType(arg.tensor.dtype) for arg in made.args})


def test_a_tile_has_a_word_of_bits_and_eight_of_bytes_for_32_blocks() -> None:
    text = text_of()
    assert text.memory == f"9 * {text.lines} * cdiv(list_blocks, 32)"
    assert text.lines == "cdiv(M * 16, BLOCK_M) * B * 2"
    assert text_of(**PACKED).lines == "(T * 16 // BLOCK_M + B + 1) * 2"


def kernel_of(**changes: str) -> str:
    """The text of the kernel, as it is written."""
    source = render_files(module(**changes), path="a.attn", sha256="")["default.cu"]
    return source[source.index(" a_lists(") : source.index(" a_forward(")]


def test_a_query_of_a_tile_finds_its_list() -> None:
    alone, packed = kernel_of(), kernel_of(**PACKED)
    assert all("const int query = q_lo + place / most;" in text for text in (alone, packed))
    assert "args.idx_ptr + b * args.stride_idx_0 + h_kv * args.stride_idx_1" in alone
    assert "if (!(query < M && h_kv < 2))" in alone
    assert "const int query_row = q_first + query;" in packed
    assert "args.idx_ptr + query_row * args.stride_idx_0 + h_kv * args.stride_idx_1" in packed
    assert "if (!(query < M && query_row < T && h_kv < 2))" in packed


@pytest.mark.parametrize(("changes", "none"), [({}, "b >= B"), (PACKED, "h_kv >= Hkv")])
def test_the_last_block_may_have_warps_without_a_tile(changes: dict[str, str], none: str) -> None:
    assert text_of(**changes).is_none(pack_of(module(**changes).kernel)) == none


def test_sizes_are_declared_that_are_read() -> None:
    """Of packed queries, how many a sequence has follows from where it ends."""
    assert "const int B = args.B, M = args.M, Hkv = args.Hkv;" in kernel_of()
    packed = kernel_of(**PACKED)
    assert "args.M" not in packed
    assert "int M = sequence < B ? q_rows : 0;" in packed
    with_rows = kernel_of(**PACKED | {"LISTS": "R", "idx, rows = 1": "idx[cu[b] + q_idx]"})
    assert re.search(r"const int [^;]*\bT = args\.T\b", with_rows) is not None


def test_the_kernel_walks_over_the_bits_of_its_tile() -> None:
    source = render_files(module(), path="a.attn", sha256="")["default.cu"]
    assert "const int list_line = tile;" in source
    assert "9ll * line * words" in source
