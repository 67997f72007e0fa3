"""Sums in an absolute order on Hopper (`plan.order`): which kernels have them, and of which tiles they are.

Prompts walk over keys from the last tile to the first, where masked tiles come first. Under an order decode
kernels do so too: a split is a segment, whose tiles they take from the last to the first, and the kernel that
joins splits begins with the last. A prompt keeps what is joined so far in shared memory, 4 bytes for each
number of o: beside the accumulators of a segment registers have no room for it.

All products are wgmma.m64nNk16, which adds 16 columns, or 16 keys, at a time, in their order; so of the tiles
the keys alone decide what is added to what.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from attnc.diagnostics import Diagnostic, error
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import Knob, Schedule
from attnc.plan.fitting import Tiles, unsupported
from attnc.plan.signature import feature
from attnc.plan.sm90.layout import PIECE

#: Columns of q, k and v beyond which shared memory has no room for sums of segments.
WIDEST = 192
#: Stages of decode kernels: for two blocks on a multiprocessor, or one with as many bytes on their way.
_DECODE_STAGES = (3, 2)
_TRITON = "write a schedule for the target 'triton'"


def ordered_tiles(attention: Attention, *, decodes: bool) -> tuple[Tiles, ...]:
    """Returns the keys of a tile and the stages that a schedule gets for what it does not say, the first that
    fits: of prompts and of decode steps the same keys.
    """
    d, dv = feature(attention.q), feature(attention.v)
    keys = 128 if max(d, dv) <= 128 else 64 if dv <= 128 else 32
    stages = _DECODE_STAGES if decodes else (4, 2) if max(d, dv) <= PIECE else (2,)
    return tuple(Tiles(tile_kv=gcd(keys, attention.segment_keys), stages=count) for count in stages)


def check_sm90_order(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields what kernels of this schedule cannot do under `order = absolute(...)`, at what asks for it."""
    attention = variant.attention
    if attention.softmax.dropout is not None:
        yield _not_lowered("dropout", attention, "random numbers are those of a call's rows")
    width = max(feature(attention.q), feature(attention.v))
    if attention.v.storage.is_part or width > WIDEST:
        latent = "two warpgroups share the columns of o, and add tiles in turn"
        wide = f"shared memory has room for sums of {WIDEST} columns, beside tiles as wide"
        label = latent if attention.v.storage.is_part else wide
        yield unsupported("these heads have no absolute order on Hopper", attention.v.span, label, _TRITON)
    if DType(attention.k.dtype).is_narrow or DType(attention.v.dtype).is_narrow:
        label = "its tiles are converted in another order"
        yield unsupported("keys of 8 bits have no absolute order on Hopper", attention.k.span, label, _TRITON)
    knob = schedule.forward.get("warp_split")
    if knob is not None and "kv" in knob.choices:
        yield _broken(knob, "each warp has keys of its own", "products of another shape", "remove it")


def _not_lowered(what: str, attention: Attention, label: str) -> Diagnostic:
    message = f"{what} beside 'order = absolute' is not lowered to Hopper"
    return unsupported(message, attention.softmax.span, label, _TRITON)


def _broken(knob: Knob, what: str, label: str, hint: str) -> Diagnostic:
    assert knob.span is not None, "a schedule comes from a file"
    message = f"'{knob.key}' breaks 'order = absolute': {what}"
    return error("E0605", message, knob.span, label, hints=(hint,))
