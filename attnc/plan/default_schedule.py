"""Schedules of attentions that have none: what is fastest on an H200 first, then less and less shared memory,
for the first that fits the device is taken. Each target has its own (`Target.default_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attnc.expr.nodes import TRUE, Const
from attnc.model.attention import Attention

#: What a caller may ask for in place of the first choice.
KEYS = ("tile.q", "tile.kv", "warps", "stages")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on. dtype: of q, as a spec spells it; width: of its rows, the larger of D and
    Dv; gradients: whether there is a backward; masked: whether some keys are left out; wanted: values of
    `KEYS` for the forward.
    """

    dtype: str
    width: int
    gradients: bool
    masked: bool
    wanted: dict[str, int] = field(default_factory=dict)


def shape_of(attention: Attention) -> Shape:
    """What the choice depends on, of an attention of a spec."""
    sizes = [tensor.shape[-1] for tensor in (attention.q, attention.v)]
    widths = [int(size.value) for size in sizes if isinstance(size, Const)]
    return Shape(
        dtype=str(attention.q.dtype),
        width=max(widths, default=128),
        gradients=bool(attention.grads) and attention.v.storage.is_plain,
        masked=attention.mask != TRUE,
    )


def choices(first: dict[str, int], wanted: dict[str, int] | None = None) -> list[str]:
    """Statements of a phase: the first choice and what needs less; values that are wanted, alone."""
    wanted = wanted or {}
    sets = {
        key: [wanted[key]] if key in wanted else [value // step for step in (1, 2, 4) if value // step >= 16]
        for key, value in first.items()
        if key.startswith("tile")
    }
    sets["warps"] = [wanted.get("warps", first["warps"])]
    sets["stages"] = [wanted["stages"]] if "stages" in wanted else list(range(first["stages"], 0, -1))
    texts = [
        f"{key} = {values[0]}" if len(values) == 1 else f"{key} in {{{', '.join(map(str, values))}}}"
        for key, values in sets.items()
    ]
    return [", ".join(texts[:2]), ", ".join(texts[2:])]
