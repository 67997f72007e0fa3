"""Bugs planted in softpick."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="what is below 0 left out of the denominator",
        attention="softpick",
        story="the rectified weights were divided by their own sum",
        anchor="l_new = l * alpha + tl.sum(tl.abs(excess), 1)",
        patch="l_new = l * alpha + tl.sum(p, 1)",
    ),
    TritonBug(
        name="1 that does not shrink with the maximum",
        attention="softpick",
        story="exp(s) was shifted by the maximum, and the 1 subtracted from it was not",
        anchor="- tl.exp2(-shift)[:, None]",
        patch="- 1.0",
    ),
    TritonBug(
        name="excluded keys as minus infinity",
        attention="softpick",
        story="the mask of a softmax was kept: exp(-inf) - 1 is -1, which the denominator counts",
        anchor="s = tl.where(keep, s, 0.0)",
        patch='s = tl.where(keep, s, -float("inf"))',
    ),
    TritonBug(
        name="weights of a softmax in dv",
        attention="softpick",
        story="p of the backward was taken for the weight",
        anchor="dv = tl.dot(picked.to(do.dtype), do, dv)",
        patch="dv = tl.dot(p.to(do.dtype), do, dv)",
        phase="backward",
    ),
    TritonBug(
        name="no gradient below 0",
        attention="softpick",
        story="what a rectifier cuts off was thought to have no gradient, but the denominator has it",
        anchor="tl.where(s < 0.0, delta[None, :], 0.0)",
        patch="0.0",
        phase="backward",
    ),
)
