"""Scales of columns of k and v in the plan: what kernels load of each element of a tile of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.diagnostics import Diagnostic
from attnc.expr.construct import ZERO, compare, conj
from attnc.expr.nodes import COLUMN, And, Binary, Compare, Dim, Expr, Index
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Schedule
from attnc.plan.fitting import unsupported
from attnc.plan.ir.kernel import KEY_ROW, REST, TILE_COLUMN, ColumnScale
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
        elif lists_blocks(attention) and not target.lists_are_bits:
            label, instead = "tiles are of keys of several blocks", "scale rows where they are stored"
            yield unsupported(f"{message} beside lists", scale.span, label, instead)


def refuse_joined_keys(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields a refusal of keys of two inputs by kernels that read one."""
    rest = variant.attention.k_rest
    if rest is not None and (refused := target.refuse_joined_keys(variant.attention, schedule)):
        message = f"columns of {rest.tensor} behind those of k are not lowered to {target.name}"
        yield unsupported(message, rest.span, *refused)


def plan_column_scales(
    attention: Attention, names: LoadNames, *, packs: bool = False, listed: bool = False
) -> tuple[ColumnScale, ...]:
    """Returns the scales of columns of a kernel, and last, of `REST`, the load of the columns behind those of
    k. packs: a tile has the rows of several query heads; listed: keys are those of a list, which names none
    past the last one, and whose length the kernel calls N.
    """
    found = {**attention.column_scales, **({} if attention.k_rest is None else {REST: attention.k_rest})}
    return tuple(_plan(name, scale, names, packs, listed) for name, scale in found.items())


def _plan(name: str, scale: Expr, names: LoadNames, packs: bool, listed: bool) -> ColumnScale:
    at: dict[Expr, Expr] = {Index("kv_idx"): KEY_ROW, Index(COLUMN): TILE_COLUMN}
    own = LoadNames(taken={*names.taken, KEY_ROW.name, TILE_COLUMN.name})
    value = own.replace(substitute(substitute(scale, {_GROUP: KV_HEAD} if packs else {}), at))
    names.taken |= own.taken
    return ColumnScale(
        tensor=name,
        fetches=tuple(
            replace(fetch, row=None, guard=_if_listed(fetch.guard) if listed else fetch.guard)
            for fetch in own.fetches
        ),
        value=value,
    )


def _if_listed(guard: Expr) -> Expr:
    parts = guard.operands if isinstance(guard, And) else (guard,)
    inside = (part for part in parts if part != compare("<", KEY_ROW, Dim("N")))
    return conj(Compare("<=", ZERO, KEY_ROW), *inside)
