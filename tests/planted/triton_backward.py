"""Bugs planted in the backward pass of Triton kernels. Their stories are told in general words."""

from __future__ import annotations

from tests.planted.bug import TritonBug


def _bug(name: str, attention: str, story: str, anchor: str, patch: str) -> TritonBug:
    return TritonBug(
        name=name, attention=attention, story=story, anchor=anchor, patch=patch, phase="backward"
    )


BUGS: tuple[TritonBug, ...] = (
    # What the rows hand on
    _bug(
        "padding of lse uninitialised",
        "full",
        "the rows past the end were masked in the store, and read by the next kernel",
        "tl.store(lse2_ptr + first_row + q_idx, lse2)",
        "tl.store(lse2_ptr + first_row + q_idx, lse2, mask=q_idx < M)",
    ),
    _bug(
        "padding of delta uninitialised",
        "full",
        "the rows past the end were masked in the store, and read by the next kernel",
        "tl.store(delta_ptr + first_row + q_idx, delta)",
        "tl.store(delta_ptr + first_row + q_idx, delta, mask=q_idx < M)",
    ),
    _bug(
        "empty rows keep lse = -inf",
        "full",
        "exp(s - -inf) is infinite for rows that see nothing and for rows past the end",
        'lse2 = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)',
        "lse2 = lse * LOG2E",
    ),
    _bug(
        "natural lse used in base 2",
        "padding",
        "forward and backward agreed on the meaning of lse, until one of them changed",
        'float("inf"), lse * LOG2E)',
        'float("inf"), lse)',
    ),
    _bug(
        "gradient of lse ignored",
        "cross",
        "lse was for the backward alone, then it became an output",
        "delta -= tl.load(dlse_head + q_idx.to(tl.int64) * stride_dlsem, mask=q_idx < M, other=0.0)",
        "pass",
    ),
    _bug(
        "delta of another head",
        "odd_dims",
        "the workspace was addressed with the number of KV heads",
        "first_row = (b * H + h).to(tl.int64) * M_padded",
        "first_row = (b * H + h // 2).to(tl.int64) * M_padded",
    ),
    # The chain rule
    _bug(
        "delta forgotten in dq",
        "full",
        "dS = P dP is the derivative of exp, not of softmax",
        "ds = p * (dp - delta[:, None])",
        "ds = p * dp",
    ),
    _bug(
        "scale applied twice",
        "full",
        "the scale moved from the step to the end, and stayed in the step too",
        "tl.dot(ds, q, dk)",
        "tl.dot((ds * 0.08838834764831843).to(q.dtype), q, dk)",
    ),
    _bug(
        "scale of dq forgotten",
        "padding",
        "the scale was applied to dk alone",
        "(dq * 0.125).to(tl.float16)",
        "dq.to(tl.float16)",
    ),
    _bug(
        "slope of softcap forgotten in dk",
        "local_sink",
        "the scores were capped when they were computed again, their derivative was not",
        "ds = p * (dp - delta[None, :]) ds = ds * (1.0 - t * t)",
        "ds = p * (dp - delta[None, :])",
    ),
    _bug(
        "gradient of the slope turned over",
        "alibi",
        "the bias is subtracted, its gradient was added",
        "dslope -= tl.sum(ds",
        "dslope += tl.sum(ds",
    ),
    _bug(
        "gradient of the slope in base 2",
        "alibi",
        "the exponent is in base 2, so log2(e) was thought to belong to its derivative",
        "dslope -= tl.sum(ds",
        "dslope -= 1.4426950408889634 * tl.sum(ds",
    ),
    _bug(
        "gradient of the sink in base 2",
        "local_sink",
        "the sink is scaled by log2(e) before exp2, its derivative is not",
        "-tl.sum(tl.exp2(sink",
        "-1.4426950408889634 * tl.sum(tl.exp2(sink",
    ),
    _bug(
        "gradient of the sink turned over",
        "local_sink",
        "the sink only takes probability away",
        "-tl.sum(tl.exp2(sink",
        "tl.sum(tl.exp2(sink",
    ),
    _bug(
        "P in place of dS",
        "cross",
        "two tiles of one shape and type, one name for both",
        "tl.dot(ds.to(k.dtype), k, dq)",
        "tl.dot(p.to(k.dtype), k, dq)",
    ),
    # Shared heads
    _bug(
        "only the first head of a group counts",
        "causal_gqa",
        "the loop over the group was written for multi-head attention",
        "for group in range(G)",
        "for group in range(0, 1)",
    ),
    _bug(
        "heads of another group",
        "odd_dims",
        "heads are grouped, not interleaved",
        "h = h_kv * G + group",
        "h = h_kv + group * Hkv",
    ),
    _bug(
        "sums of a group start anew",
        "causal_gqa",
        "the accumulators were cleared inside the loop over the group",
        "row = b * H + h if TMA",
        "row = b * H + h\n        dk = tl.zeros([BLOCK_N, 128], tl.float32)\n        if TMA",
    ),
    # Dropout
    _bug(
        "another mask for dk and dv",
        "dropout",
        "the seed was read in the forward and a constant in the backward",
        "kept = _keep_dropout(p_value, seed, b, h, q_idx, kv_lo, BLOCK_M, BLOCK_N).T",
        "kept = _keep_dropout(p_value, 1, b, h, q_idx, kv_lo, BLOCK_M, BLOCK_N).T",
    ),
    _bug(
        "dP not dropped",
        "dropout",
        "P was dropped in the forward, so dP must be",
        "dp = tl.where(kept, dp * keep_scale, 0.0) ds = p * (dp - delta[:, None])",
        "ds = p * (dp - delta[:, None])",
    ),
    _bug(
        "kept probabilities not rescaled in dv",
        "dropout",
        "1 / (1 - p) was applied to the output, and forgotten in its derivative",
        "tl.where(kept, p * keep_scale, 0.0)",
        "tl.where(kept, p, 0.0)",
    ),
    # Masks, transposed
    _bug(
        "transposed bounds aligned top-left",
        "causal_gqa",
        "the first row that sees a key is not the key's number, unless M = N",
        "lo = tl.maximum(kv_lo + M - N, 0) // BLOCK_M * BLOCK_M",
        "lo = kv_lo // BLOCK_M * BLOCK_M",
    ),
    _bug(
        "transposed full range starts early",
        "causal_gqa",
        "the first row that sees any key of the tile, where the first that sees all was meant",
        "tl.maximum(kv_hi + M - N, 0)",
        "tl.maximum(kv_lo + M - N, 0)",
    ),
    _bug(
        "transposed mask compares the wrong way",
        "causal_gqa",
        "rows and columns were exchanged, the comparison was not",
        "kv_idx[:, None] <= q_pos[None, :]",
        "kv_idx[:, None] >= q_pos[None, :]",
    ),
    _bug(
        "window ends one tile early in dk",
        "local_sink",
        "the end of the last row that sees the tile was rounded down",
        "hi = tl.minimum(kv_hi + M - N + 129, M)",
        "hi = tl.minimum(kv_hi + M - N + 129, M) // BLOCK_M * BLOCK_M",
    ),
    # Packed sequences
    _bug(
        "rows of the first sequence",
        "varlen",
        "the workspace of lse and delta was numbered within a sequence",
        "first_row = h.to(tl.int64) * T + q_first q_head",
        "first_row = h.to(tl.int64) * T\n        q_head",
    ),
    _bug(
        "queries counted like keys",
        "varlen",
        "with one cu_seqlens for both it made no difference",
        "q_first = tl.load(cu_q_ptr + b.to(tl.int64) * stride_cu_q_0)",
        "q_first = tl.load(cu_k_ptr + b.to(tl.int64) * stride_cu_k_0)",
    ),
    _bug(
        "keys behind the last sequence",
        "varlen",
        "the gradients of keys that no sequence has were never written",
        'Made("dk", like="k", zero=True)',
        'Made("dk", like="k")',
    ),
    # Memory
    _bug(
        "dk stored with the strides of dv",
        "odd_dims",
        "k and v have the same strides in most models",
        "DK += b.to(tl.int64) * stride_dkb",
        "DK += b.to(tl.int64) * stride_dvb",
    ),
    _bug(
        "atomic sums start anywhere",
        "prefix_lm",
        "the buffer that atomics add to was not cleared",
        'Made("dq", like="q", type="f32", zero=True)',
        'Made("dq", like="q", type="f32")',
    ),
    _bug(
        "dq of the last keys alone",
        "fa1",
        "each tile of keys wrote its share of dq over those before",
        "tl.load(dq_at, mask=(q_idx < M)[:, None], other=0.0) + dq",
        "dq",
    ),
    _bug(
        "gradient of the first batch alone",
        "bias",
        "a bias shared by the batch has a gradient summed over the batch",
        "part = part.sum(lacking)",
        "part = part[0] if lacking == [0] else part.sum(lacking)",
    ),
    # Keys whose columns are values
    _bug(
        "values left out of dk",
        "latent",
        "the kernel for dk was that of keys with values of their own",
        "dk = tl.dot(p.to(do.dtype), do, dk)",
        "pass",
    ),
    _bug(
        "columns that are keys alone left out of the score",
        "latent",
        "the second part of the columns was multiplied in the kernel for dq alone",
        "s = tl.dot(k_2, q_2.T, s)",
        "pass",
    ),
    _bug(
        "second part of dk over the first",
        "latent",
        "the pointer was moved for the load of q, not for the store of dk",
        "_store_rows(DK + 32,",
        "_store_rows(DK,",
    ),
    _bug(
        "second part of dk from the first of q",
        "latent",
        "both sums were of the same columns of q, of which the tile has as many",
        "q_2 = _load_rows(q_head + 32,",
        "q_2 = _load_rows(q_head,",
    ),
    _bug(
        "factor of ds left out of dk",
        "latent",
        "the constant factor of ds was left to the end, where nothing is multiplied by it",
        "ds = ds * 0.14285714285714285\n    ds = ds.to(q.dtype)",
        "ds = ds.to(q.dtype)",
    ),
)
