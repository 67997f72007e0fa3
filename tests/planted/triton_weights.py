"""Bugs planted in kernels without a softmax."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="excluded keys weigh what a score of 0 does",
        attention="hstu",
        story="the mask was applied to the score, not to the weight",
        anchor="s = tl.where(keep, s, 0.0)",
        patch="s = tl.where(keep, s, 0.01)",
    ),
    TritonBug(
        name="division by the queries' length",
        attention="hstu",
        story="N of a jagged sequence was taken for the length of the whole batch",
        anchor="o = o * (1.0 / tl.maximum(N, 1))",
        patch="o = o * (1.0 / tl.maximum(T, 1))",
    ),
    TritonBug(
        name="derivative of masked weights",
        attention="hstu",
        story="p is 0 there, and was thought to be a factor of ds, as under a softmax",
        anchor="""ds = tl.where(keep, ds, 0.0)
    ds = ds.to(q.dtype)""",
        patch="""ds = ds
    ds = ds.to(q.dtype)""",
        phase="backward",
    ),
    TritonBug(
        name="weight before the division beside one after it",
        attention="hstu",
        story="dv was left without the factor that dk and dq have",
        anchor="_store_rows(DV, kv_lo, N, stride_dvn, (dv * (1.0 / tl.maximum(N, 1))).to(tl.bfloat16)",
        patch="_store_rows(DV, kv_lo, N, stride_dvn, (dv).to(tl.bfloat16)",
        phase="backward",
    ),
    TritonBug(
        name="splits of which the last sixteen count",
        attention="hstu_decode",
        story="what joins splits by their lse carries a maximum along; a plain sum was not carried",
        anchor="o += tl.sum(o_split, 0)",
        patch="o = tl.sum(o_split, 0)",
    ),
    TritonBug(
        name="a factor of one split",
        attention="hstu_decode",
        story="what divides a row was taken from the keys of the split at hand",
        anchor="o = o * (1.0 / tl.maximum(N, 1))",
        patch="o = o * (1.0 / tl.maximum(split_size, 1))",
    ),
)
