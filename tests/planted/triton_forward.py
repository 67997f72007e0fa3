"""Bugs planted in the forward pass of Triton kernels. Their stories are told in general words."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    # Masks
    TritonBug(
        name="causal aligned top-left",
        attention="causal_gqa",
        story="the mask compares row and column numbers, which is right only while M = N",
        anchor="q_pos = q_idx + N - M",
        patch="q_pos = q_idx",
    ),
    TritonBug(
        name="causal mask one key too far",
        attention="causal_gqa",
        story="< and <= were exchanged when the test was turned around",
        anchor="keep = kv_idx[None, :] <= q_pos[:, None]",
        patch="keep = kv_idx[None, :] <= q_pos[:, None] + 1",
    ),
    TritonBug(
        name="window one key short",
        attention="local_sink",
        story="a window of W keys or of W keys before the own one: both conventions exist",
        anchor="q_pos[:, None] - 128 <= kv_idx[None, :]",
        patch="q_pos[:, None] - 128 < kv_idx[None, :]",
    ),
    TritonBug(
        name="window two-sided under causal",
        attention="local_sink",
        story="the right end of the window was left open and causal forgotten",
        anchor="& (kv_idx[None, :] <= q_pos[:, None])",
        patch="",
    ),
    TritonBug(
        name="first tile of the window skipped",
        attention="local_sink",
        story="the start of the loop was rounded up to a tile instead of down",
        anchor="lo = tl.maximum(first_pos - 128, 0) // BLOCK_N * BLOCK_N",
        patch="lo = (tl.maximum(first_pos - 128, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N",
    ),
    TritonBug(
        name="full tiles up to the last row",
        attention="causal_gqa",
        story="the range without mask code was computed for the last row of the tile, not the first",
        anchor="full_hi = tl.maximum(first_pos + 1, 0)",
        patch="full_hi = tl.maximum(last_pos + 1, 0)",
    ),
    TritonBug(
        name="keys past the end kept",
        attention="prefix_lm",
        story="a mask that is not causal was thought to end the row by itself",
        anchor="(kv_idx[None, :] < N) & ",
        patch="",
    ),
    TritonBug(
        name="last tile skipped",
        attention="causal_gqa",
        story="the number of tiles was rounded down",
        anchor="range(full_hi, hi, BLOCK_N)",
        patch="range(full_hi, hi // BLOCK_N * BLOCK_N, BLOCK_N)",
    ),
    TritonBug(
        name="end of a document found too early",
        attention="document",
        story="the search for the end of a run of equal ids was the one for its start",
        anchor="other=0) <= value",
        patch="other=0) < value",
    ),
    TritonBug(
        name="documents searched in the first sequence",
        attention="document",
        story="the row of the sequence was not taken where ids are searched",
        anchor="_lower_bound(doc_row, stride_doc_1, N, tl.minimum",
        patch="_lower_bound(doc_ptr, stride_doc_1, N, tl.minimum",
    ),
    # Softmax
    TritonBug(
        name="finite sentinel",
        attention="causal_gqa",
        story="masked scores were -5e4 instead of -inf, and all visible ones were lower",
        anchor='s = tl.where(keep, s, -float("inf"))',
        patch="s = tl.where(keep, s, -5e4)",
    ),
    TritonBug(
        name="-inf minus -inf",
        attention="causal_gqa",
        story="a row that has seen nothing yet subtracts its maximum of -inf",
        anchor='shift = tl.where(m_new == -float("inf"), 0.0, m_new)',
        patch="shift = m_new",
    ),
    TritonBug(
        name="division by an empty row's sum",
        attention="causal_gqa",
        story="rows that see nothing came out NaN",
        anchor="tl.where(l == 0.0, 1.0, l)",
        patch="l",
    ),
    TritonBug(
        name="accumulator not rescaled",
        attention="full",
        story="the maximum grew and what had been accumulated kept its old scale",
        anchor="v, acc * alpha[:, None]",
        patch="v, acc",
    ),
    TritonBug(
        name="sum not rescaled",
        attention="full",
        story="the maximum grew and the sum kept its old scale",
        anchor="l_new = l * alpha +",
        patch="l_new = l +",
    ),
    TritonBug(
        name="normalised twice over",
        attention="fa1",
        story="an output that is kept normalised was rescaled as if it were not",
        anchor="acc * (l * alpha)[:, None]",
        patch="acc * alpha[:, None]",
    ),
    TritonBug(
        name="second pass without the sum",
        attention="cross",
        story="the second pass subtracted the maximum, and nobody divided by the sum of the first",
        anchor="o = acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]",
        patch="o = acc",
    ),
    TritonBug(
        name="scale of the padded head dim",
        attention="odd_dims",
        story="1/sqrt(D) was taken of the head dimension after padding it to a power of two",
        anchor="SCALE = tl.constexpr(NUMBER)",
        patch=lambda scale: f"SCALE = tl.constexpr({scale * (80 / 128) ** 0.5!r})",
    ),
    TritonBug(
        name="base-2 lse",
        attention="causal_gqa",
        story="the kernel works in base 2 and the log-sum-exp left it so",
        anchor="(m + tl.log2(l)) * LN2",
        patch="m + tl.log2(l)",
    ),
    TritonBug(
        name="P in lower precision",
        attention="single",
        story="probabilities were rounded to bfloat16 although everything else is float32",
        anchor="p.to(v.dtype)",
        patch="p.to(tl.bfloat16).to(tl.float32)",
    ),
    TritonBug(
        name="sink left out of the sum",
        attention="local_sink",
        story="the sink took part in the maximum but not in the denominator",
        anchor="l = tl.full([BLOCK_M], 1.0, tl.float32)",
        patch="l = tl.full([BLOCK_M], 0.0, tl.float32)",
    ),
    TritonBug(
        name="sink of the K/V head",
        attention="local_sink",
        story="one sink per query head, read by the number of the K/V head",
        anchor="sink_ptr + h.to(tl.int64)",
        patch="sink_ptr + h_kv.to(tl.int64)",
    ),
    TritonBug(
        name="sink in natural units",
        attention="local_sink",
        story="the logits were in base 2, the sink was not",
        anchor="+ sink * 1.4426950408889634",
        patch="+ sink",
    ),
    # Dropout
    TritonBug(
        name="dropout with a constant seed",
        attention="dropout",
        story="the seed was taken when the graph was captured",
        anchor="_keep_dropout(p_value, seed,",
        patch="_keep_dropout(p_value, 0,",
    ),
    TritonBug(
        name="dropout repeats in every tile",
        attention="dropout",
        story="the generator was indexed by the position inside the tile",
        anchor="h, q_idx, kv_lo, BLOCK_M, BLOCK_N), p, 0.0)",
        patch="h, q_idx, 0, BLOCK_M, BLOCK_N), p, 0.0)",
    ),
    TritonBug(
        name="dropout not scaled",
        attention="dropout",
        story="what is kept was not divided by 1 - p",
        anchor="o = o * tl.where(p_value < 1.0, 1.0 / (1.0 - p_value), 0.0)",
        patch="o = o * 1.0",
    ),
    # Memory
    TritonBug(
        name="rows past the end not zero-filled",
        attention="causal_gqa",
        story="0 * NaN: what lies behind V reached the output through weights of 0",
        anchor="mask=inside, other=0.0",
        patch='mask=inside, other=float("nan")',
    ),
    TritonBug(
        name="K addressed with V's strides",
        attention="causal_gqa",
        story="they were equal in every test",
        anchor="memory = memories.get(name)",
        patch='memory = memories.get("v" if name == "k" else name)',
    ),
    TritonBug(
        name="strides made up from the shape",
        attention="causal_gqa",
        story="the kernel took for granted that q is contiguous",
        anchor="memory = memories.get(name)",
        patch=(
            "memory = memories.get(name)\n"
            '        if name == "q":\n'
            "            memory = contiguous(memory.shape, memory.dtype)"
        ),
    ),
    TritonBug(
        name="offsets in 32 bits",
        attention="causal_gqa",
        story="row times stride passed 2^31 elements in a large cache",
        anchor="tl.load(x + row.to(tl.int64)[:, None] * stride",
        patch="tl.load(x + row[:, None] * stride",
    ),
    TritonBug(
        name="lse taken for contiguous",
        attention="odd_dims",
        story="its strides were those of another layout",
        anchor="h.to(tl.int64) * stride_lseh",
        patch="h.to(tl.int64) * M",
    ),
    TritonBug(
        name="K/V heads interleaved",
        attention="causal_gqa",
        story="head h read K/V head h % Hkv, not h // G",
        anchor="h_kv = h // G",
        patch="h_kv = h % (H // G)",
    ),
    TritonBug(
        name="last section of heads too long",
        attention="full",
        story="the last group of programs was as large as the others and ran past the heads",
        anchor="heads = tl.minimum(SECTION, B * H - first_head)",
        patch="heads = SECTION",
    ),
    TritonBug(
        name="outputs of skipped rows unwritten",
        attention="causal_gqa",
        story="a tile with nothing to see returned early and left its outputs as they were",
        anchor="q_idx = q_lo + tl.arange(0, BLOCK_M)",
        patch="if q_hi + N - M < 0:\n        return\n    q_idx = q_lo + tl.arange(0, BLOCK_M)",
    ),
)
