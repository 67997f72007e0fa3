"""Bugs planted in kernels that leave out forgotten keys."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="no margin",
        attention="forgetting",
        story="keys were left out as soon as anything was forgotten",
        anchor="c_first + margin_value + tl.abs(c_first)",
        patch="c_first + tl.abs(c_first)",
    ),
    TritonBug(
        name="margin on the wrong side",
        attention="forgetting",
        story="the sign of the bias was taken for that of the input",
        anchor="c_first + margin_value + tl.abs(c_first)",
        patch="c_first - margin_value + tl.abs(c_first)",
    ),
    TritonBug(
        name="first key beyond the query's own",
        attention="forgetting",
        story="a margin of 0 in the last row left nothing of the first",
        anchor="lo = tl.maximum(0, tl.minimum(first_pos, c_to)) // BLOCK_N * BLOCK_N",
        patch="lo = (tl.maximum(0, tl.minimum(first_pos, c_to)) // BLOCK_N + 1) * BLOCK_N",
    ),
    TritonBug(
        name="positions taken for rows",
        attention="forgetting",
        story="gradients of keys stopped at a position where rows were counted",
        anchor="hi = tl.minimum(tl.maximum(kv_hi + 1, c_from) + M - N, M)",
        patch="hi = tl.minimum(tl.maximum(kv_hi + 1, c_from), M)",
        phase="backward",
    ),
    TritonBug(
        name="no margin in gradients of keys",
        attention="forgetting",
        story="the forward alone was given one",
        anchor="c_last - margin_value - tl.abs(c_last)",
        patch="c_last - tl.abs(c_last)",
        phase="backward",
    ),
)
