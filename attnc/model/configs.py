"""Schedule x Variant -> Configs: the points of the schedule's knobs that its conditions admit."""

from __future__ import annotations

from itertools import product
from math import prod

from attnc.diagnostics import DiagnosticError, error
from attnc.effort import spend
from attnc.expr.nodes import Const
from attnc.model.attention import Variant
from attnc.model.conditions import holds
from attnc.model.knobs import keys_of
from attnc.model.schedule import Config, Phase, Schedule, Value, knobs_of, whole_of

MAX_CONFIGS = 4096


def configs(schedule: Schedule, phase: Phase, variant: Variant) -> tuple[Config, ...]:
    """Every config of a phase, the default first: a value for each key of the phase, absent keys at their
    defaults.

    The default of `tile.d` is the whole head dimension. A kernel of the backward has the keys of `backward`,
    its own instead of those of the same name, and obeys the conditions of both. Raises DiagnosticError when
    no config satisfies the conditions, and when there are more than MAX_CONFIGS before pruning.
    """
    phases = (phase,) if (whole := whole_of(phase)) is None else (whole, phase)
    knobs = knobs_of(schedule, phase)
    names = {key: of for part in phases for key, of in keys_of(part, variant.attention.grads).items()}
    dims = _head_dims(variant)
    choices: dict[str, tuple[Value, ...]] = {
        name: knobs[name].choices if name in knobs else (dims["D"] if name == "tile.d" else key.default,)
        for name, key in names.items()
    }
    place = schedule.span or variant.source.span(0, 0)
    if (count := prod(len(values) for values in choices.values())) > MAX_CONFIGS:
        message = f"the {phase} phase has {count} configs before 'where'; the limit is {MAX_CONFIGS}"
        raise DiagnosticError([error("E0509", message, place, "too many to choose from")])
    spend(count)
    points = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    conditions = [condition for part in phases for condition in schedule.where.get(part, ())]
    params: dict[str, Value] = dict(variant.params)
    kept = tuple(
        Config(values=point)
        for point in points
        if all(holds(condition, params | dims | point) for condition in conditions)
    )
    if not kept:
        condition = next(
            (c for c in conditions if not any(holds(c, params | dims | p) for p in points)), conditions[-1]
        )
        raise DiagnosticError(
            [
                error(
                    "E0409",
                    f"no config of the {phase} phase is left for variant '{variant.name}'",
                    condition.span,
                    "excludes all of them, or all that the others leave",
                    notes=(f"there are {count} before 'where'",),
                )
            ]
        )
    return kept


def _head_dims(variant: Variant) -> dict[str, Value]:
    dims: dict[str, Value] = {}
    for name, tensor in (("D", variant.attention.q), ("Dv", variant.attention.v)):
        size = tensor.shape[-1]
        assert isinstance(size, Const), "head dimensions of a variant are numbers"
        dims[name] = size.value
    return dims
