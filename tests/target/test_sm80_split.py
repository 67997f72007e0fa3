"""The split of a block, as text."""

from __future__ import annotations

from tests.target.texts import text_of


def test_splits_have_as_many_tiles_each() -> None:
    split = text_of("decode").split
    assert split is not None
    assert split.joined_by.endswith("_combine")
    assert split.size_names[0] == "SPLITS"
    comment, size, bounds = split.bounds
    assert comment.startswith("//")
    assert "/ args.SPLITS * BLOCK_N" in size
    assert "split_hi = min(split_lo + split_size, hi)" in bounds


def test_what_is_not_split_has_none() -> None:
    assert text_of("causal_gqa", "bf16_d128").split is None
