"""When keys and values of 8 bits become 16 on Hopper: before a kernel multiplies them (`plan.conversion`), or
tile by tile in it (`sm90.narrow`).
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention
from attnc.model.schedule import Schedule
from attnc.plan.conversion import list_convertible
from attnc.plan.fitting import several_values, unsupported
from attnc.plan.lists import lists_blocks
from attnc.plan.signature import feature
from attnc.plan.sm90.layout import WIDEST


def converts_before(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether K and V are converted before the kernel of a prompt. Those of a cache, of which a call
    uses a part, are only if a schedule says so, or columns have scales and no kernel multiplies them
    otherwise, or there are gradients, whose kernels read 16 bits. Those of wide heads are only if a schedule
    says so: their kernel decodes, too.
    """
    knob = schedule.forward.get("convert")
    said = "auto" if knob is None else knob.choices[0]
    if schedule.is_decode:
        return said == "before" and has_wide_values(attention) and bool(list_convertible(attention))
    if said == "tiles":
        return False
    is_paged = attention.k.storage.is_paged
    reads_tiles = is_paged or ("N" in attention.lengths and not attention.grads)
    if said == "auto" and reads_tiles and not attention.column_scales:
        return False
    return bool(list_convertible(attention))


def has_wide_values(attention: Attention) -> bool:
    """Returns whether two warpgroups share the columns of o, and values are no columns of the keys. Such
    heads have one kernel for prompts and decoding, and beside its tiles none of 8 bits have room. Lists name
    rows of memory, which a conversion would move.
    """
    is_apart = not attention.v.storage.is_part and not lists_blocks(attention)
    return is_apart and feature(attention.v) > WIDEST


def check_conversion(attention: Attention, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields why K and V cannot be converted when a schedule says."""
    knob = schedule.forward.get("convert")
    if knob is None:
        return
    if len(knob.choices) > 1:
        yield several_values(knob)
    elif schedule.is_decode and not has_wide_values(attention):
        label = "it reads each key once"
        yield unsupported("a decode kernel converts tiles as they come", knob.span, label, "remove it")
