"""Schedules of attentions that have none: what is fastest on an H200 first, then less and less shared memory,
for the first that fits the device is taken. Each target has its own (`Target.default_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attnc.expr.nodes import TRUE, Const
from attnc.model.attention import Attention
from attnc.plan.fitting import Tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on. dtype: of q, as a spec spells it; width: of its rows, the larger of D and
    Dv; gradients: whether there is a backward; masked: whether some keys are left out; wanted: sizes of
    the forward that a caller asks for.
    """

    dtype: str
    width: int
    gradients: bool
    masked: bool
    wanted: Tiles = field(default_factory=Tiles)


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


def choices(first: Tiles, wanted: Tiles | None = None) -> list[str]:
    """Statements of a phase: the first choice and what needs less; values that are wanted, alone."""
    sets = {key: _smaller(key, value) for key, value in first.by_key().items()}
    sets |= {key: [value] for key, value in (wanted or Tiles()).by_key().items()}
    texts = [
        f"{key} = {values[0]}" if len(values) == 1 else f"{key} in {{{', '.join(map(str, values))}}}"
        for key, values in sets.items()
    ]
    return [", ".join(texts[:2]), ", ".join(texts[2:])]


def _smaller(key: str, value: int) -> list[int]:
    """A size, and those that need less; the number of warps as it is."""
    match key:
        case "warps":
            return [value]
        case "stages":
            return list(range(value, 0, -1))
        case _:
            return [value // step for step in (1, 2, 4) if value // step >= 16]
