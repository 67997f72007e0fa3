"""Bugs planted in Triton kernels of decoding, pages and packed sequences."""

from __future__ import annotations

from tests.planted.bug import TritonBug

_ROWS_OF_K = "_load_paged(K, page, kv_lo, N, stride_kp, stride_kn, MASKED, BLOCK_N, 16, 128)"

BUGS: tuple[TritonBug, ...] = (
    # Pages
    TritonBug(
        name="page numbers multiplied in 32 bits",
        attention="chunked_prefill",
        story="a page's number times its stride passes 2^31 in a pool of a few gigabytes",
        anchor="return page.to(tl.int64)",
        patch="return page",
    ),
    TritonBug(
        name="rows behind the end of the last page",
        attention="chunked_prefill",
        story="the rest of the last page is what its owner before left there, and 0 * NaN is NaN",
        anchor="tile = tl.load(x + at[:, None] + col[None, :], mask=row[:, None] < stop, other=0.0)",
        patch="tile = tl.load(x + at[:, None] + col[None, :])",
    ),
    TritonBug(
        name="table read past the end of a sequence",
        attention="chunked_prefill",
        story="entries past the last page are whatever the table held before",
        anchor="page = tl.load(table + (row // PAGE).to(tl.int64) * stride, mask=row < stop, other=0)",
        patch="page = tl.load(table + (row // PAGE).to(tl.int64) * stride)",
    ),
    TritonBug(
        name="entries of a partial tile asked for as a whole",
        attention="paged_decode",
        story="a tile in which the sequence ends has entries that nobody has written",
        anchor="mask=start < stop if WHOLE else entry * PAGE < stop",
        patch="mask=start < stop",
    ),
    TritonBug(
        name="one table for all",
        attention="paged_decode",
        story="the stride of the block table was forgotten",
        anchor="block_table_row = block_table_ptr + b.to(tl.int64) * stride_block_table_0",
        patch="block_table_row = block_table_ptr",
    ),
    TritonBug(
        name="pages looked up a tile too far ahead",
        attention="paged_decode",
        story="page numbers travel two steps ahead of their rows, and one was handed on at once",
        anchor="page = tl.maximum(next_page, 0)",
        patch="page = tl.maximum(later_page, 0)",
    ),
    TritonBug(
        name="values in the pages' order of keys",
        attention="chunked_prefill",
        story="v was addressed with k's strides",
        anchor="_load_pages(V, page, kv_lo, N, stride_vp, stride_vn, BLOCK_N, 16, 128)",
        patch="_load_pages(V, page, kv_lo, N, stride_kp, stride_kn, BLOCK_N, 16, 128)",
    ),
    # Packed sequences
    TritonBug(
        name="rows behind the last sequence attended",
        attention="chunked_prefill",
        story="a grid that covers any lengths has tiles past cu_seqlens[B]",
        anchor="M = tl.where(b < B, q_rows, 0)",
        patch="M = q_rows",
    ),
    # Flash-Decoding
    TritonBug(
        name="packed heads taken for queries",
        attention="paged_decode",
        story="the rows of a tile are queries times heads, and were counted as queries",
        anchor="q_idx = row // G",
        patch="q_idx = row % M",
    ),
    TritonBug(
        name="splits that share a tile",
        attention="paged_decode",
        story="a split began a tile before the one ahead of it ended",
        anchor="split_lo = split * split_size",
        patch="split_lo = tl.maximum(split * split_size - BLOCK_N, 0)",
    ),
    TritonBug(
        name="splits weighed alike by the second kernel",
        attention="paged_decode",
        story="the results of the splits were averaged, not weighed by their sums",
        anchor='tl.exp2(tl.load(lse_splits_ptr + split, mask=split < SPLITS, other=-float("inf")) - shift)',
        patch="tl.where(split < SPLITS, 1.0, 0.0)",
    ),
    TritonBug(
        name="splits' lse in natural units",
        attention="paged_decode",
        story="what leaves the first kernel is in base 2, what leaves the second is not",
        anchor="tl.store(lse_splits_ptr + split_row, m + tl.log2(l), mask=exists)",
        patch="tl.store(lse_splits_ptr + split_row, (m + tl.log2(l)) * LN2, mask=exists)",
    ),
    TritonBug(
        name="merging nothing with nothing",
        attention="paged_decode",
        story="the maximum of no keys is -inf, and -inf minus -inf is NaN",
        anchor='shift = tl.where(m == -float("inf"), 0.0, m)  # nothing seen',
        patch="shift = m  # nothing seen",
    ),
    TritonBug(
        name="the sink counted by every split",
        attention="decode_sink",
        story="the splits are added up, and each had counted the sink",
        anchor="""m = tl.where(split == 0, tl.zeros([BLOCK_M], tl.float32) + sink_q * NUMBER, -float("inf"))
            l = tl.where(split == 0, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)""",
        patch=lambda log2e: (
            f"m = tl.zeros([BLOCK_M], tl.float32) + sink_q * {log2e!r}; "
            "l = tl.full([BLOCK_M], 1.0, tl.float32)"
        ),
    ),
    # FlashDecoding++
    TritonBug(
        name="a unified maximum without a fallback",
        attention="unified_decode",
        story="phi was thought to hold for every input; scores beyond its range gave NaN",
        anchor="if tl.max((lost & exists).to(tl.int32), 0) > 0:",
        patch="if tl.max((lost & exists).to(tl.int32), 0) > 1:",
    ),
    TritonBug(
        name="scores far below phi trusted",
        attention="unified_decode",
        story="only overflow was looked for, and rows whose terms all underflow divide zero by zero",
        anchor='((highest < LOW) & (highest > -float("inf")))',
        patch="(highest > HIGH)",
    ),
    # Keys and values of 8 bits
    TritonBug(
        name="e4m3 read with another bias",
        attention="kv8_decode",
        story="there are several formats of 4 and 3 bits, and their numbers differ by powers of two",
        anchor=f"k = _e4m3_to_bf16({_ROWS_OF_K}, False)",
        patch=f"k = {_ROWS_OF_K}.to(tl.float8e4b15, bitcast=True).to(tl.bfloat16)",
    ),
    TritonBug(
        name="neighbours the wrong way round",
        attention="kv8_decode",
        story="of a conversion of two numbers the first operand becomes the upper half",
        anchor="cvt.rn.bf16x2.f32 $1, d, c;",
        patch="cvt.rn.bf16x2.f32 $1, c, d;",
    ),
    TritonBug(
        name="codes taken for integers",
        attention="kv8_decode",
        story="a cache of fp8 is handed around as bytes, and was converted as such",
        anchor=f"k = _e4m3_to_bf16({_ROWS_OF_K}, False)",
        patch=f"k = {_ROWS_OF_K}.to(tl.int8, bitcast=True).to(tl.bfloat16)",
    ),
    TritonBug(
        name="the scale of the values forgotten in splits",
        attention="kv8_decode",
        story="the kernel that joins splits was to apply it, and did not",
        anchor="o = o * v_scale_q[:, None]",
        patch="o = o if SPLIT else o * v_scale_q[:, None]",
    ),
    TritonBug(
        name="the scale of the values applied twice",
        attention="kv8_decode",
        story="where a sequence is not split the result was scaled when it was stored, too",
        anchor="tl.store(o_at[:, None] + d[None, :], o.to(tl.bfloat16), mask=exists[:, None])",
        patch="o *= v_scale_q[:, None]; "
        "tl.store(o_at[:, None] + d[None, :], o.to(tl.bfloat16), mask=exists[:, None])",
    ),
    TritonBug(
        name="the scale of the values applied to the lse",
        attention="kv8_decode",
        story="the factor was put into the denominator, whose logarithm leaves too",
        anchor="o = o * v_scale_q[:, None]",
        patch="o = o * v_scale_q[:, None]; l = l / v_scale_q",
    ),
    TritonBug(
        name="scales of another head",
        attention="kv8_decode",
        story="there is a scale for each KV head, and rows of a tile are of query heads",
        anchor="tl.load(k_scale_ptr + (h // G).to(tl.int64) * stride_k_scale_0, mask=h // G < Hkv, other=0)",
        patch="tl.load(k_scale_ptr + (h % Hkv).to(tl.int64) * stride_k_scale_0, mask=h // G < Hkv, other=0)",
    ),
    TritonBug(
        name="scales of the values of another head",
        attention="kv8_decode",
        story="heads of a group lay beside each other in one model, and apart in the next",
        anchor="tl.load(v_scale_ptr + (h // G).to(tl.int64) * stride_v_scale_0, mask=h // G < Hkv, other=0)",
        patch="tl.load(v_scale_ptr + (h % Hkv).to(tl.int64) * stride_v_scale_0, mask=h // G < Hkv, other=0)",
    ),
    TritonBug(
        name="the scale of the values off by one percent",
        attention="kv8_decode",
        story="a scale was rounded on its way to the kernel",
        anchor="o = o * v_scale_q[:, None]",
        patch="o = o * (v_scale_q * 1.01)[:, None]",
    ),
    TritonBug(
        name="the last query by all heads",
        attention="speculative",
        story="rows of a tile are of the heads of one group, and were divided by the heads of all",
        anchor="q_hi = (tl.minimum(row_lo + BLOCK_M, M * G) - 1) // G",
        patch="q_hi = (tl.minimum(row_lo + BLOCK_M, M * G) - 1) // H",
    ),
)
