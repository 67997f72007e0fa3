"""Attention over blocks against float64: a row of blocks sees the keys of those that it names, in order."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    convert_bsr_mask_layout,
    segment_packbits,
)
from tests.adapters.flashinfer.batches import GROUP, HEADS, SIZE, compare, workspace
from tests.adapters.oracle import attend

HEADS_OF_Q = GROUP * HEADS
F32: dict[str, Any] = {"q_data_type": torch.float32, "o_data_type": torch.float32}


def draw(rows: int, keys: int) -> list[torch.Tensor]:
    """q: [rows, Hq, D]; k, v: [keys, Hkv, D]."""
    return [torch.randn(n, heads, SIZE) for n, heads in ((rows, HEADS_OF_Q), (keys, HEADS), (keys, HEADS))]


def as_rows(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr, indices) of a matrix of booleans."""
    return torch.nn.functional.pad(blocks.sum(1).cumsum(0), (1, 0)).int(), blocks.nonzero()[:, 1].int()


def expect(
    parts: list[torch.Tensor],
    blocks: torch.Tensor,
    row: int,
    column: int,
    elements: Any = None,
    *,
    scale: float = SIZE**-0.5,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [M, Hq, D] and lse [M, Hq] in base e, a row of blocks at a time. elements: [blocks, row, column]."""
    q, k, v = parts
    columns, found, done = torch.arange(len(k)).view(-1, column), [], 0
    for number, line in enumerate(blocks):
        own, seen = q[number * row : (number + 1) * row], columns[line].flatten()
        if elements is not None:
            of_line = elements[done : done + int(line.sum())]
            options["seen"] = of_line.transpose(0, 1).flatten(1)[: len(own)]
            done += len(of_line)
        found.append(attend(own, k[seen], v[seen], scale=scale, **options))
    o, lse = zip(*found, strict=True)
    return torch.cat(o), torch.cat(lse)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("row", "column", "options"),
    [
        (1, 1, {}),  # decoded, a query at a time
        (3, 5, {"mask": True}),
        (16, 4, {"packed_mask": True, "logits_soft_cap": 3.0}),
        (32, 8, {"causal": True}),
    ],
    ids=["elements", "masked", "packed", "causal"],
)
def test_rows_of_blocks(row: int, column: int, options: dict[str, Any]) -> None:
    torch.manual_seed(row)
    rows, columns = 2 * row + row // 2, 4
    blocks = torch.rand(-(-rows // row), columns) < 0.6
    blocks[1] = False  # which sees nothing
    indptr, indices = as_rows(blocks)
    parts, given, elements = draw(rows, column * columns), dict(options), None
    if "mask" in options or "packed_mask" in options:
        given["mask"] = elements = torch.rand(len(indices), row, column) < 0.7
    if elements is not None and "packed_mask" in options:
        counts = torch.tensor([len(x) for x in torch.split(torch.arange(rows), row)])
        ends = torch.nn.functional.pad((counts * indptr.diff() * column).cumsum(0), (1, 0))
        lines = zip(torch.split(elements, indptr.diff().tolist()), counts, strict=True)
        flat = torch.cat([x.transpose(0, 1)[:n].flatten() for x, n in lines])
        given = options | {"packed_mask": segment_packbits(flat, ends, "little")[0]}
    wrapper: Any = BlockSparseAttentionWrapper(workspace())
    wrapper.plan(
        indptr, indices, rows, column * columns, row, column, HEADS_OF_Q, HEADS, SIZE, **given, **F32
    )
    o, lse = wrapper.run(*parts, return_lse=True)
    wanted = expect(
        parts,
        blocks,
        row,
        column,
        elements,
        causal=options.get("causal", False),
        softcap=options.get("logits_soft_cap", 0.0),
    )
    compare(o, lse, wanted)
    out, kept = torch.empty_like(o), torch.empty_like(lse)
    assert wrapper.run(*parts, out=out, lse=kept) is out
    assert torch.equal(out, o)
    assert torch.equal(kept, lse)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("of_all_heads", [False, True])
def test_masks_of_heads(of_all_heads: bool) -> None:
    row, column, rows, columns = 16, 32, 40, 3
    torch.manual_seed(3)
    blocks = torch.rand(HEADS, 3, columns) < 0.6
    blocks[0, 1] = False
    given = blocks.repeat_interleave(GROUP, 0) if of_all_heads else blocks
    parts = draw(rows, column * columns)
    wrapper: Any = BlockSparseAttentionWrapper(workspace(), backend="vsa_sm100_blk64")
    sizes = rows, column * columns, row, column, HEADS_OF_Q, HEADS, SIZE
    wrapper.plan(None, None, *sizes, block_mask=given, sm_scale=0.3, **F32)
    o, lse = wrapper.run(*parts, return_lse=True)
    for head in range(HEADS):
        own = slice(head * GROUP, (head + 1) * GROUP)
        of_head = [parts[0][:, own], *(x[:, head : head + 1] for x in parts[1:])]
        wanted = expect(of_head, blocks[head], row, column, causal=False, scale=0.3)
        compare(o[:, own], lse[:, own] / math.log(2), wanted)
    wrapper.plan(None, None, *sizes, block_mask=torch.zeros_like(given), **F32)
    o, lse = wrapper.run(*parts, return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("columns", "causal"),
    [
        ([[2, 0, 3], [1, 1, 3]], False),
        ([[4, 12, 4], [8, 8, 4]], True),  # pages of 4 keys
        ([[0, 0, 5], [5, 0, 0]], True),
    ],
)
def test_blocks_of_any_size(columns: list[list[int]], causal: bool) -> None:
    """Of each head others, with a common factor or without, and some without a row."""
    torch.manual_seed(7)
    rows, sizes, keys = torch.tensor([[2, 3, 0], [1, 1, 3]]), torch.tensor(columns), sum(columns[0])
    blocks = torch.rand(HEADS, 3, 3) < 0.6
    q, k, v = (x.transpose(0, 1).contiguous() for x in draw(5, keys))
    wrapper: Any = VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(blocks, rows, sizes, HEADS_OF_Q, HEADS, SIZE, causal=causal, q_data_type=torch.float32)
    out, kept = torch.empty(HEADS * 5, GROUP, SIZE), torch.empty(HEADS * 5, GROUP)
    o, lse = wrapper.run(q, k, v, out=out, lse=kept, return_lse=True)
    for head in range(HEADS):
        places = torch.split(torch.arange(keys), columns[head])
        done = 0
        for line, count in zip(blocks[head], rows[head].tolist(), strict=True):
            seen = torch.cat(
                [x for x, is_seen in zip(places, line, strict=True) if is_seen] or [places[0][:0]]
            )
            own = slice(head * GROUP, (head + 1) * GROUP), slice(done, done + count)
            known = (x[head, seen][:, None] for x in (k, v))
            wanted = attend(q[own].transpose(0, 1), *known, scale=SIZE**-0.5, causal=causal)
            compare(o[own].transpose(0, 1), lse[own].T, wanted)
            done += count
    for mine, theirs in ((o, out), (lse, kept)):
        in_order = theirs.view(HEADS, 5, *theirs.shape[1:]).transpose(1, 2).flatten(0, 1)
        assert torch.equal(mine, in_order)
        assert mine.is_contiguous()


def test_a_result_has_the_type_that_is_asked() -> None:
    """Which is f16 where nothing is said, whatever queries have."""
    blocks = torch.ones(2, 2, dtype=torch.bool)
    parts = [x.bfloat16() for x in draw(8, 8)]
    wrapper: Any = BlockSparseAttentionWrapper(workspace())
    sizes = 8, 8, 4, 4, HEADS_OF_Q, HEADS, SIZE
    wrapper.plan(*as_rows(blocks), *sizes, q_data_type="bfloat16")
    o = wrapper.run(*parts)
    assert isinstance(o, torch.Tensor)
    assert o.dtype is torch.float16
    into = torch.empty_like(o)
    assert wrapper.run(*parts, out=into) is into
    assert torch.equal(into, o)
    wrapper.plan(*as_rows(blocks), *sizes, q_data_type="bfloat16", o_data_type=torch.bfloat16)
    exact = wrapper.run(*parts)
    assert isinstance(exact, torch.Tensor)
    assert torch.equal(exact.half(), o)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("rows", "keys"), [(0, 16), (16, 0), (0, 0)])
def test_nothing_to_attend(rows: int, keys: int) -> None:
    none, lines = torch.zeros(0).int(), rows // 16
    parts = draw(rows, keys)
    wrapper: Any = BlockSparseAttentionWrapper(workspace())
    sizes = rows, keys, 16, 16, HEADS_OF_Q, HEADS, SIZE
    blocks = torch.ones(HEADS, lines, keys // 16).bool()
    for given in ({}, {"mask": torch.ones(0, 16, 16).bool()}, {"block_mask": blocks}):
        wrapper.plan(torch.zeros(lines + 1).int(), none, *sizes, **given, **F32)
        o, lse = wrapper.run(*parts, return_lse=True)
        assert o.shape == parts[0].shape
        assert lse.shape == parts[0].shape[:2]
        assert not o.any()
    variable: Any = VariableBlockSparseAttentionWrapper(workspace())
    counts = torch.full((HEADS, 1), rows), torch.full((HEADS, 1), keys)
    one = torch.ones(HEADS, 1, 1).bool()
    variable.plan(one, *counts, HEADS_OF_Q, HEADS, SIZE, q_data_type=torch.float32)
    assert not variable.run(*(x.transpose(0, 1).contiguous() for x in parts)).any()


def test_convert_bsr_mask_layout() -> None:
    mask = torch.arange(12).view(3, 2, 2)
    wanted = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    assert convert_bsr_mask_layout(mask, torch.tensor([0, 2, 3])).tolist() == wanted
    assert convert_bsr_mask_layout(mask[:0], torch.tensor([0])).tolist() == []


PLANNED: dict[str, Any] = {
    "indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([1, 0]), "M": 8, "N": 8, "R": 4, "C": 4,
    "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": SIZE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"N": 9}, "plan: N: expected a multiple of C, 4, got 9"),
        ({"R": 0}, "plan: R: expected at least 1, got 0"),
        ({"R": 3}, "plan: indptr: expected shape [4], got [3]"),
        ({"indices": torch.tensor([1, 2])}, "plan: indices: expected 0 .. 1, got 1 .. 2"),
        ({"indices": torch.tensor([1])}, "plan: indices: expected 2 numbers, as indptr says, got 1"),
        ({"indptr": None}, "plan: indptr: expected a tensor, got NoneType"),
        ({"mask": torch.ones(2, 4, 3)}, "plan: mask: expected dtype torch.bool"),
        ({"mask": torch.ones(2, 4, 3).bool()}, "plan: mask: expected shape [2, 4, 4], got [2, 4, 3]"),
        ({"num_kv_heads": 3}, "plan: num_qo_heads: expected a multiple of num_kv_heads, 3, got 4"),
        ({"kv_block_lens": torch.ones(2)}, "plan: kv_block_lens: expected None"),
        ({"q_scale": torch.ones(2)}, "plan: q_scale: expected None"),
        ({"o_data_type": "int8"}, "plan: o_data_type: expected dtype torch.float16"),
        ({"o_data_type": 3}, "plan: o_data_type: expected a dtype, got 3"),
        ({"block_mask": torch.ones(2, 2, 2)}, "plan: R: expected a multiple of 16 beside block_mask, got 4"),
        ({"block_mask": torch.ones(2), "causal": True}, "plan with block_mask: causal: expected None"),
        ({"block_mask": torch.ones(2), "logits_soft_cap": 2.0}, "plan: logits_soft_cap: expected none"),
        ({"block_mask": torch.ones(2), "pos_encoding_mode": "ALIBI"},
         "plan: pos_encoding_mode: expected none beside block_mask, got 'ALIBI'"),
        ({"block_mask": torch.ones(3, 1, 1).bool(), "R": 16, "C": 16, "N": 16},
         "plan: block_mask: expected shape [2, 1, 1], got [3, 1, 1]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str) -> None:
    wrapper: Any = BlockSparseAttentionWrapper(workspace())
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(said)}"):
        wrapper.plan(**PLANNED | change)
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(*draw(8, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(8, 4, 9)}, "run: q: expected shape [8, 4, 16], as planned, got [8, 4, 9]"),
        ({"k": torch.zeros(8, 4, SIZE)}, "run: k: expected shape [8, 2, 16], as planned, got [8, 4, 16]"),
        ({"v": torch.zeros(8, 2, SIZE).half()}, "run: v: expected dtype torch.float32, as planned, got"),
        ({"scale_q": torch.ones(4)}, "run: scale_q: expected None"),
        ({"out": torch.zeros(8, 4, SIZE).half()}, "run: out: expected dtype torch.float32, as planned, got"),
        ({"lse": torch.zeros(8, 2)}, "run: lse: expected shape [8, 4], as planned, got [8, 2]"),
        ({"q": torch.zeros(8, 4, SIZE, requires_grad=True)}, "run: q: expected a tensor without gradients"),
    ],
)
def test_a_call_that_differs_from_the_plan_is_named(change: dict[str, Any], said: str) -> None:
    wrapper: Any = BlockSparseAttentionWrapper(workspace())
    wrapper.plan(**PLANNED, **F32)
    call = dict(zip("qkv", draw(8, 8), strict=True))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{re.escape(said)}"):
        wrapper.run(**call | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_row_sz": torch.ones(3, 2).int()},
         "plan: block_row_sz: expected shape [2, rows], got [3, 2]"),
        ({"block_col_sz": torch.tensor([[1, 3], [2, 3]])},
         "plan: block_col_sz: expected sizes with the same sum for every head, got [4, 5]"),
        ({"block_row_sz": torch.tensor([[5, -1], [2, 2]])},
         "plan: block_row_sz: expected at least 0, got -1"),
        ({"block_mask_map": torch.ones(2, 2, 3).bool()},
         "plan: block_mask_map: expected shape [2, 2, 2], got [2, 2, 3]"),
        ({"k_scale": torch.ones(1)}, "plan: k_scale: expected None"),
        ({"pos_encoding_mode": "ALIBI"}, "plan: pos_encoding_mode: expected 'NONE', got 'ALIBI'"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named(change: dict[str, Any], said: str) -> None:
    planned = {
        "block_mask_map": torch.ones(2, 2, 2).bool(),
        "block_row_sz": torch.tensor([[1, 3], [2, 2]]),
        "block_col_sz": torch.tensor([[4, 4], [2, 6]]),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": SIZE,
    }
    wrapper: Any = VariableBlockSparseAttentionWrapper(workspace())
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(said)}"):
        wrapper.plan(**planned | change)
    with pytest.raises(RuntimeError, match=r"run: expected a call of plan\(\) before"):
        wrapper.run(*draw(8, 8))


def test_kernels_for_blocks_have_an_lse_in_base_e_and_results_of_the_type_of_q() -> None:
    """Whether blocks are named by lists or by a mask, and where the lse is given too."""
    blocks, parts = torch.ones(1, 1, dtype=torch.bool), [torch.zeros_like(x).half() for x in draw(16, 16)]
    sizes, lse = (16, 16, 16, 16, HEADS_OF_Q, HEADS, SIZE), torch.empty(16, HEADS_OF_Q)
    for backend, mask in (("auto", True), ("vsa_sm100_blk64", False), ("cake", True)):
        wrapper: Any = BlockSparseAttentionWrapper(workspace(), backend)
        named = {"block_mask": blocks.expand(HEADS, 1, 1)} if mask else {}
        wrapper.plan(*as_rows(blocks), *sizes, o_data_type="bfloat16", **named)
        for into in (None, lse):
            o, found = wrapper.run(*parts, lse=into, return_lse=True)
            assert o.dtype is torch.float16
            assert into is None or found is into
            torch.testing.assert_close(found, torch.full_like(found, math.log(16)))


def test_lse_is_in_base_2() -> None:
    wrapper: Any = VariableBlockSparseAttentionWrapper(workspace())
    one = torch.ones(1, 1)
    wrapper.plan(one.bool()[None], one.int(), 8 * one.int(), 1, 1, SIZE, q_data_type=torch.float32)
    zeros = torch.zeros(1, 8, SIZE)
    assert wrapper.run(zeros[:, :1], zeros, zeros, return_lse=True)[1].item() == pytest.approx(math.log2(8))
