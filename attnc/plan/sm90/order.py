"""Sums in an absolute order on Hopper (`plan.order`): which kernels have them, and of which tiles they are.

Prompts walk over keys from the last tile to the first, where masked tiles come first. Under an order decode
kernels do so too: a split is a segment, whose tiles they take from the last to the first, and the kernel that
joins splits begins with the last. A prompt keeps what is joined so far in shared memory, 4 bytes for each
number of o: beside the accumulators of a segment registers have no room for it. Nor has shared memory beside
tiles of more than 192 columns: then it lies in memory, a place for each block that runs.

Heads of more than 256 columns have the kernel of two warpgroups for prompts too, which take turns at tiles.
Whose turn it is follows from the number of the tile, counted from the first key on, for a warpgroup begins a
product with its own columns; and the denominator is handed on from turn to turn. A decode step has a block
for each segment, a prompt one for all of them (`walks_segments`).

All products are wgmma.m64nNk16, which adds 16 columns, or 16 keys, at a time, in their order; so of the tiles
the keys alone decide what is added to what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from attnc.diagnostics import Diagnostic, error
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Knob, Schedule
from attnc.plan.fitting import Tiles, unsupported
from attnc.plan.signature import feature, normalise
from attnc.plan.sm90.layout import PIECE, WIDEST
from attnc.plan.sm90.narrow import narrow_of

#: Columns of q, k and v beyond which sums of segments lie in memory, not in shared memory.
WIDEST_KEPT = 192
#: Stages of decode kernels: for two blocks on a multiprocessor, or one with as many bytes on their way.
_DECODE_STAGES = (3, 2)
#: And last, of kernels that convert tiles: those of 8 bits, which come ahead, take the room of a second one.
_CONVERTING_STAGES = (1,)
#: Tiles of heads whose prompts and decode steps have the kernel of two warpgroups.
_SHARED_TILES = (Tiles(tile_kv=64, stages=2), Tiles(tile_kv=32, stages=2))
_TRITON = "write a schedule for the target 'triton'"


def ordered_tiles(attention: Attention, *, decodes: bool) -> tuple[Tiles, ...]:
    """Returns the keys of a tile and the stages that a schedule gets for what it does not say, the first that
    fits: of prompts and of decode steps the same keys.
    """
    d, dv = feature(attention.q), feature(attention.v)
    if dv > WIDEST:
        return tuple(
            replace(tiles, tile_kv=gcd(tiles.tile_kv or 0, attention.segment_keys)) for tiles in _SHARED_TILES
        )
    widest = max(d, dv)
    keys = 128 if widest <= 128 else 32 if 128 < dv <= WIDEST_KEPT else 64
    of_16_bits = _DECODE_STAGES if decodes else (4, 2) if widest <= PIECE else (2,)
    stages = (*of_16_bits, *(_CONVERTING_STAGES if narrow_of(attention, apart=True) else ()))
    return tuple(Tiles(tile_kv=gcd(keys, attention.segment_keys), stages=count) for count in stages)


def check_sm90_order(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields what kernels of this schedule cannot do under `order = absolute(...)`, at what asks for it."""
    attention, knobs = variant.attention, schedule.forward
    if feature(attention.v) > WIDEST and solve(normalise(attention).mask).tile_may is not None:
        label = "two warpgroups take turns at tiles, and none is left out between"
        message = f"a mask with gaps beside {feature(attention.v)} columns has no absolute order on Hopper"
        yield unsupported(message, attention.mask.span, label, _TRITON)
    knob = knobs.get("warp_split")
    if knob is not None and "kv" in knob.choices:
        yield _refuse(knob, "each warp has keys of its own", "products of another shape", "remove it")
    knob = knobs.get("tile.d")
    if knob is not None and knob.choices != (feature(attention.v),):
        label = "each block multiplies its own columns of q and k first"
        yield _refuse(knob, "columns are added in another order", label, "remove it")
    knob = knobs.get("consumers")
    if knob is not None and schedule.is_decode and 2 in knob.choices and feature(attention.v) <= WIDEST:
        label = "in every other tile the last columns come first"
        yield _refuse(knob, "columns are added in another order", label, "write 'consumers = 1'")


def _refuse(knob: Knob, what: str, label: str, hint: str) -> Diagnostic:
    assert knob.span is not None, "a schedule comes from a file"
    message = f"'{knob.key}' breaks 'order = absolute': {what}"
    return error("E0605", message, knob.span, label, hints=(hint,))
