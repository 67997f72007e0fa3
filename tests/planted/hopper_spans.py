"""Bugs planted where spans of keys have a sum of dq each: whose turn it is in one, where its sums lie, and
how they are added.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="the last span left out",
        attention="hopper_spans",
        file="backward_finish",
        story="few queries see its keys, and the error was thought to be that of rounding",
        anchor="for (int span = 0; span < args.SPANS; ++span) if (made",
        patch="for (int span = 0; span < args.SPANS - (args.SPANS > 1); ++span) if (made",
    ),
    HopperBug(
        name="sums of a span that sees no query",
        attention="hopper_spans",
        file="backward_finish",
        story="sums were cleared first where this was measured",
        anchor="if (made >> span & 1)",
        patch="",
    ),
    HopperBug(
        name="whether a span is seen asked of the first",
        attention="hopper_spans",
        file="backward_finish",
        story="keys of one span alone were enough once",
        anchor="[span * span_size + (blockIdx.x + 1ll) * DQ_SIZE - TURNS]",
        patch="[(blockIdx.x + 1ll) * DQ_SIZE - TURNS]",
    ),
    HopperBug(
        name="all spans at one place",
        attention="hopper_spans",
        file="backward_dkdv",
        story="the sum is right where one block runs at a time",
        anchor="(long long)span * args.B * H * dq_tiles + ",
        patch="",
    ),
    HopperBug(
        name="spans of the heads of one sequence",
        attention="hopper_spans",
        file="backward_dkdv",
        story="a batch of one was measured",
        anchor="(long long)span * args.B * H * dq_tiles",
        patch="(long long)span * H * dq_tiles",
    ),
    HopperBug(
        name="the first turn asked of the next span",
        attention="hopper_spans",
        file="backward_dkdv",
        story="the tile behind the last one of a span adds to other sums",
        anchor="kv_after < span_end * BLOCK_N",
        patch="kv_after < N",
    ),
    HopperBug(
        name="spans of as many tiles each",
        attention="hopper_spans",
        file="backward_dkdv",
        story="the number of tiles was a multiple of the number of spans where this was measured",
        anchor="span_end = kv_tiles * (span + 1) / args.SPANS;",
        patch="span_end = span_first + kv_tiles / args.SPANS;",
    ),
    HopperBug(
        name="turns of the first span alone cleared",
        attention="hopper_spans",
        file="backward_preprocess",
        story="memory that nobody has used yet is often zero",
        anchor="i < TURNS * args.SPANS; i += THREADS",
        patch="i < TURNS; i += THREADS",
    ),
)
