"""Scales of columns of k and v in the plan: what kernels load of each element of a tile of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.diagnostics import Diagnostic
from attnc.expr.nodes import COLUMN, Binary, Dim, Expr, Index
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Schedule
from attnc.plan.fitting import unsupported
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN, ColumnScale
from attnc.plan.lists import KV_HEAD, lists_blocks
from attnc.plan.loads import LoadNames
from attnc.plan.target import Target

_GROUP = Binary("//", Index("h"), Dim("G"))


def refuse_column_scales(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields a refusal of scales of columns by kernels that multiply what they have copied, or that gather
    keys, or have keys outermost.
    """
    attention, loops = variant.attention, schedule.forward.get("loops")
    for name, scale in attention.column_scales.items():
        message = f"a scale of columns of {name} is not lowered"
        if refused := target.refuse_column_scale(attention, schedule, name):
            yield unsupported(f"{message} to {target.name}", scale.span, *refused)
        elif loops is not None and ("kv", "q") in loops.choices:
            label, instead = "a tile of keys stays, without it", "write 'loops = [q, kv]'"
            yield unsupported(f"{message} with loops = [kv, q]", scale.span, label, instead)
        elif lists_blocks(attention):
            label, instead = "tiles are of keys of several blocks", "scale rows where they are stored"
            yield unsupported(f"{message} beside lists", scale.span, label, instead)


def plan_column_scales(
    attention: Attention, names: LoadNames, *, packs: bool = False
) -> tuple[ColumnScale, ...]:
    """Returns the scales of columns of a kernel. packs: a tile has the rows of several query heads."""
    return tuple(_plan(name, scale, names, packs) for name, scale in attention.column_scales.items())


def _plan(name: str, scale: Expr, names: LoadNames, packs: bool) -> ColumnScale:
    at: dict[Expr, Expr] = {Index("kv_idx"): KEY_ROW, Index(COLUMN): TILE_COLUMN}
    own = LoadNames(taken={*names.taken, KEY_ROW.name, TILE_COLUMN.name})
    value = own.replace(substitute(substitute(scale, {_GROUP: KV_HEAD} if packs else {}), at))
    names.taken |= own.taken
    return ColumnScale(
        tensor=name,
        fetches=tuple(replace(fetch, row=None) for fetch in own.fetches),
        value=value,
    )
