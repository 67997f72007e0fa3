"""Schedules of attentions that have none: what is fastest on an H200 first, then less and less shared memory,
for the first that fits the device is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attnc.expr.nodes import TRUE, Const
from attnc.model.attention import Attention
from attnc.model.tensors import Dense

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


def default_schedule(attention: Attention, target: str) -> str:
    """The text of a schedule for an attention of a spec."""
    sizes = [tensor.shape[-1] for tensor in (attention.q, attention.v)]
    widths = [int(size.value) for size in sizes if isinstance(size, Const)]
    shape = Shape(
        dtype=str(attention.q.dtype),
        width=max(widths, default=128),
        gradients=bool(attention.grads) and isinstance(attention.v.storage, Dense),
        masked=attention.mask != TRUE,
    )
    return schedule_for(attention.name, target, shape)


def schedule_for(name: str, target: str, shape: Shape) -> str:
    """The text of a schedule for an attention of this name."""
    make = _triton if target == "triton" else _cuda
    body = "\n".join(f"  {line}" for line in make(shape))
    return f"schedule {name} for {target} {{\n{body}\n}}\n"


def _triton(shape: Shape) -> list[str]:
    wide = shape.dtype == "f32"  # twice the memory, and three products for one
    width = shape.width * (2 if wide else 1)
    if width <= 64:
        first = {"tile.q": 64, "tile.kv": 128, "warps": 4, "stages": 2}
    elif width <= 128:
        first = {"tile.q": 64 if shape.masked else 128, "tile.kv": 64, "warps": 4, "stages": 2 + shape.masked}
    elif width <= 256:
        first = {
            "tile.q": 64 if wide else 128,
            "tile.kv": 32 if wide else 64,
            "warps": 4 if wide else 8,
            "stages": 2,
        }
    else:
        first = {"tile.q": 32, "tile.kv": 32, "warps": 4, "stages": 2}
    lines = ["loops = [q, kv], order = longest_first", *_choices(first, shape.wanted)]
    if shape.gradients:
        lines += ["backward {", *(f"  {line}" for line in _triton_backward(width, wide)), "}"]
    return lines


def _triton_backward(width: int, wide: bool) -> list[str]:
    if width <= 64:
        dq = {"tile.q": 64, "tile.kv": 64, "warps": 4, "stages": 3}
        dkdv = {"tile.q": 64, "tile.kv": 64, "warps": 4, "stages": 2}
    elif width <= 128:
        dq = {"tile.q": 128, "tile.kv": 64, "warps": 8, "stages": 3}
        dkdv = {"tile.q": 64, "tile.kv": 64, "warps": 4, "stages": 2}
    elif width <= 256 and not wide:
        dq = {"tile.q": 128, "tile.kv": 32, "warps": 8, "stages": 3}
        dkdv = {"tile.q": 32, "tile.kv": 128, "warps": 8, "stages": 3}
    else:
        dq = dkdv = {"tile.q": 32, "tile.kv": 32, "warps": 4, "stages": 2}
    return [
        "dq {",
        "  order = longest_first",
        *(f"  {line}" for line in _choices(dq)),
        "}",
        "dkdv {",
        *(f"  {line}" for line in _choices(dkdv)),
        "}",
    ]


def _cuda(shape: Shape) -> list[str]:
    first = {"tile.q": 128 if shape.width <= 128 else 64, "tile.kv": 64, "warps": 4, "stages": 1}
    return ["loops = [q, kv], warp_split = q, order = longest_first", *_choices(first, shape.wanted)]


def _choices(first: dict[str, int], wanted: dict[str, int] | None = None) -> list[str]:
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
