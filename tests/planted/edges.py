"""Bugs at the edges of what inputs may hold: nothing at all, lengths beyond it, signs, infinities, kinks."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, Place, TritonBug

BUGS: tuple[Bug, ...] = (
    # Nothing to see
    TritonBug(
        name="sequences without keys skipped",
        attention="varlen",
        story="without keys there is nothing to compute, but there are rows to write",
        anchor="N = tl.where(q_lo < M, N, 0)",
        patch="N = tl.where(q_lo < M, N, 0)\n    if (N == 0) & (q_lo < M):\n        return",
    ),
    CudaBug(
        name="sequences without keys skipped",
        attention="varlen",
        story="without keys there is nothing to compute, but there are rows to write",
        anchor="N = where<int>(q_lo < M, N, 0);",
        patch="N = where<int>(q_lo < M, N, 0);\n    if (N == 0 && q_lo < M)\n        return;",
    ),
    TritonBug(
        name="dk of sequences without queries unwritten",
        attention="varlen",
        story="gradients of keys were cleared at a time when they were added to",
        anchor='Made("dv", like="v", zero=True)',
        patch='Made("dv", like="v")',
        phase="backward",
    ),
    TritonBug(
        name="an axis without keys",
        attention="full",
        story="a shape with a 0 in it was thought to have empty results",
        anchor="if evaluate(self.work, sizes) == 0: return plain(results), (), ()",
        patch=('if evaluate(self.work, sizes) * sizes["N"] == 0:\n            return plain(results), (), ()'),
    ),
    CudaBug(
        name="an axis without keys",
        attention="full",
        file="host",
        story="a shape with a 0 in it was thought to have empty results",
        anchor="if evaluate(self.work, sizes) == 0: return plain(results), (), ()",
        patch=('if evaluate(self.work, sizes) * sizes["N"] == 0:\n            return plain(results), (), ()'),
    ),
    TritonBug(
        name="sequences without keys attend the first page",
        attention="paged_decode",
        story="a length of 0 was what padding of the batch has, and its rows did not matter",
        anchor="N = tl.maximum(tl.minimum(kv_len, N), 0)",
        patch="N = tl.maximum(tl.minimum(kv_len, N), 1)",
    ),
    CudaBug(
        name="sequences without keys attend the first page",
        attention="paged_decode",
        story="a length of 0 was what padding of the batch has, and its rows did not matter",
        anchor="N = max(min(kv_len, N), 0);",
        patch="N = max(min(kv_len, N), 1);",
    ),
    # A length beyond its axis
    TritonBug(
        name="a length beyond its axis",
        attention="decode",
        story="lengths count tokens, and the cache had room for all of them",
        anchor="N = tl.maximum(tl.minimum(kv_len, N), 0)",
        patch="N = kv_len",
    ),
    CudaBug(
        name="a length beyond its axis",
        attention="decode",
        story="lengths count tokens, and the cache had room for all of them",
        anchor="N = max(min(kv_len, N), 0);",
        patch="N = kv_len;",
    ),
    TritonBug(
        name="a length beyond its table",
        attention="chunked_prefill",
        story="lengths count tokens, and the table had a page for all of them",
        anchor="N = tl.maximum(tl.minimum(kv_len, N), 0)",
        patch="N = kv_len",
    ),
    # Heads that share keys
    TritonBug(
        name="the last query of a tile of shared heads",
        attention="speculative",
        story="the row after the last was divided by the group, and one subtracted then",
        anchor="q_hi = (tl.minimum(row_lo + BLOCK_M, M * G) - 1) // G",
        patch="q_hi = tl.minimum(row_lo + BLOCK_M, M * G) // G - 1",
    ),
    CudaBug(
        name="the last query of a tile of shared heads",
        attention="speculative",
        story="the row after the last was divided by the group, and one subtracted then",
        anchor="const int q_hi = (min(row_lo + BLOCK_M, M * G) - 1) / G;",
        patch="const int q_hi = min(row_lo + BLOCK_M, M * G) / G - 1;",
    ),
    TritonBug(
        name="heads counted in whole tiles",
        attention="decode",
        story="tiles of shared heads were counted per query, which is right while the group fills a tile",
        anchor="exists = row < M * G",
        patch="exists = row < tl.maximum(M * G // BLOCK_M, 1) * BLOCK_M",
    ),
    # Sizes that coincide
    TritonBug(
        name="a grid of as many rows as keys",
        attention="cross",
        story="queries and keys were as many in every test",
        anchor='"cdiv(M, BLOCK_M) * B * H"',
        patch='"cdiv(N, BLOCK_M) * B * H"',
    ),
    CudaBug(
        name="a grid of as many rows as keys",
        attention="cross",
        file="host",
        story="queries and keys were as many in every test",
        anchor='"cross_forward", "cdiv(M,',
        patch='"cross_forward", "cdiv(N,',
    ),
    TritonBug(
        name="rows of the workspace by head, then batch",
        attention="padding",
        story="as many sequences as heads, and the two axes of a workspace were exchanged",
        anchor="row = b * H + h",
        patch="row = h * B + b",
        phase="backward",
    ),
    CudaBug(
        name="rows of the workspace by head, then batch",
        attention="padding",
        file="backward_preprocess",
        story="as many sequences as heads, and the two axes of a workspace were exchanged",
        anchor="(long long)(b * H + h) * args.M_padded",
        patch="(long long)(h * args.B + b) * args.M_padded",
    ),
    TritonBug(
        name="parts by query, then head",
        attention="decode",
        story="one query, and the order of the axes of the parts did not matter",
        anchor="((b * H + h) * M + q_idx)",
        patch="((b * M + q_idx) * H + h)",
    ),
    # Dropout of everything
    TritonBug(
        name="everything dropped",
        attention="dropout",
        story="1 / (1 - p) was written down as it is in the paper",
        anchor="tl.where(p_value < 1.0, 1.0 / (1.0 - p_value), 0.0)",
        patch="(1.0 / (1.0 - p_value))",
    ),
    CudaBug(
        name="everything dropped",
        attention="dropout",
        story="1 / (1 - p) was written down as it is in the paper",
        anchor="(p_value < 1.0f ? 1.0f / (1.0f - p_value) : 0.0f)",
        patch="(1.0f / (1.0f - p_value))",
    ),
    # Signs
    TritonBug(
        name="the largest product under a negative scale",
        attention="negative",
        story="the maximum was taken of the products, and scaled with them",
        anchor="s = -s",
        patch="s, top = -s, tl.max(s, 1)",
        also=(Place(anchor="tl.max(s, 1) * SCALE", patch="top * -SCALE"),),
    ),
    CudaBug(
        name="the size of a score for its sign",
        attention="negative",
        story="the sign was moved into the scale, where it was lost",
        anchor="s = -s;",
        patch="s = fabsf(s);",
    ),
    TritonBug(
        name="a negative scale at run time",
        attention="scaled",
        story="the maximum of the products, times the scale, is the maximum while the scale is positive",
        anchor="s = s * (scale_value * NUMBER)",
        patch=lambda log2e: (
            f"top = tl.max(s, 1) * (scale_value * {log2e!r})\n    s = s * (scale_value * {log2e!r})"
        ),
        also=(Place(anchor="tl.max(s, 1))", patch="top)"),),
    ),
    CudaBug(
        name="a negative scale at run time",
        attention="scaled",
        story="the scale was thought to be a temperature, and its sign checked by nobody",
        anchor="s = s * (scale_value * NUMBERf);",
        patch=lambda log2e: f"s = s * (fabsf(scale_value) * {log2e!r}f);",
    ),
    # Infinities in biases
    TritonBug(
        name="rows whose bias is all -inf",
        attention="bias",
        story="only tiles with a mask were thought to hold -inf",
        anchor='shift = tl.where(m_new == -float("inf"), 0.0, m_new)',
        patch="shift = m_new",
    ),
    CudaBug(
        name="rows whose bias is all -inf",
        attention="bias",
        story="only tiles with a mask were thought to hold -inf",
        anchor="const float shift = m_new == -INF ? 0.0f : m_new;",
        patch="const float shift = kv_lo >= full_hi && m_new == -INF ? 0.0f : m_new;",
    ),
    # FlashDecoding++
    TritonBug(
        name="bounds scaled twice",
        attention="unified_decode",
        story="the lower bound was turned into base 2 where it is declared, and where it is used",
        anchor="highest < LOW",
        patch="highest < LOW * 1.4426950408889634",
    ),
    CudaBug(
        name="bounds scaled twice",
        attention="unified_decode",
        story="the lower bound was turned into base 2 where it is declared, and where it is used",
        anchor="top[r] < LOW",
        patch="top[r] < LOW * 1.4426950408889634f",
    ),
    TritonBug(
        name="rows that see nothing done again",
        attention="unified_decode",
        story="a maximum of -inf is below every bound, and the count of fallbacks told of them",
        anchor='((highest < LOW) & (highest > -float("inf")))',
        patch="(highest < LOW)",
    ),
    TritonBug(
        name="fallbacks counted row by row",
        attention="unified_decode",
        story="a counter for tuning was added where rows are looked at",
        anchor="tl.atomic_add(fallbacks_ptr, 1)",
        patch="tl.atomic_add(fallbacks_ptr, tl.sum((lost & exists).to(tl.int32), 0))",
    ),
    CudaBug(
        name="fallbacks counted by every thread",
        attention="unified_decode",
        story="a counter for tuning was added without thinking of threads",
        anchor="if (threadIdx.x == 0 && args.fallbacks_ptr)",
        patch="if (args.fallbacks_ptr)",
    ),
    # Division of negatives
    TritonBug(
        name="division that rounds towards zero",
        attention="striped",
        story="// of the language is not that of the machine",
        anchor="return tl.where(x >= 0, x // size, -1 - (-1 - x) // size)",
        patch="return tl.where(x >= 0, x // size, -(-x // size))",
    ),
    CudaBug(
        name="remainders of negatives",
        attention="striped",
        story="% of the language is not that of the machine",
        anchor="floor_mod(q_pos[r] - kv_idx, 3)",
        patch="((q_pos[r] - kv_idx) % 3)",
    ),
    TritonBug(
        name="rows of pixels before the first",
        attention="neighborhood",
        story="positions before the first key were divided as if there were none",
        anchor="tl.abs(_floor_div(q_pos[:, None], 64) - kv_idx[None, :] // 64)",
        patch="tl.abs(tl.where(q_pos < 0, -(-q_pos // 64), q_pos // 64)[:, None] - kv_idx[None, :] // 64)",
    ),
    CudaBug(
        name="rows of pixels before the first",
        attention="neighborhood",
        story="positions before the first key were divided as if there were none",
        anchor="abs(floor_div(q_pos[r], 64) - kv_idx / 64)",
        patch="abs(q_pos[r] / 64 - kv_idx / 64)",
    ),
    # Kinks
    TritonBug(
        name="the kink of a maximum",
        attention="rectified",
        story="which side a tie belongs to was decided anew in the kernel of dq",
        anchor="ds = ds * tl.where(s * 0.125 >= 0, 1.0, 0.0) if MASKED: ds = tl.where(p == 0.0, 0.0, ds) "
        "# the slope of a masked score may be anything dq =",
        patch="ds = ds * tl.where(s * 0.125 > 0, 1.0, 0.0)\n    dq =",
        phase="backward",
    ),
    CudaBug(
        name="the kink of a maximum",
        attention="rectified",
        file="backward_dq",
        story="which side a tie belongs to was decided anew in the kernel of dq",
        anchor="where<float>(s * 0.125f >= 0, 1.0f, 0.0f)",
        patch="where<float>(s * 0.125f > 0, 1.0f, 0.0f)",
    ),
)
