"""Schedule x Variant -> Configs: the points of its knobs and `config` lines that its conditions admit. A
projection has a config for each point of each of its implementations.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Literal, TypeAlias, overload

from attnc.diagnostics import DiagnosticError, Label, error
from attnc.effort import spend
from attnc.expr.nodes import Const
from attnc.model.attention import Variant
from attnc.model.conditions import holds
from attnc.model.knobs import keys_of
from attnc.model.projection import IMPLS, Impl, ProjectionVariant
from attnc.model.schedule import (
    BackwardConfig,
    Config,
    ForwardConfig,
    Knob,
    Phase,
    ProjectionConfig,
    Schedule,
    Value,
    config_type,
    listed_of,
    whole_of,
)

MAX_CONFIGS = 4096
AnyVariant: TypeAlias = Variant | ProjectionVariant


def schedule_of(schedule: Schedule, variant: AnyVariant) -> Schedule:
    """The schedule of one variant: what `when` blocks say of it put in, the blocks themselves gone.

    Raises DiagnosticError where two blocks that hold for the variant set the same key.
    """
    if not schedule.whens:
        return schedule
    values = dict(variant.params) | _sizes(variant)
    knobs, where, listed = dict(schedule.knobs), dict(schedule.where), dict(schedule.listed)
    for phase, whens in schedule.whens.items():
        chosen = [when for when in whens if holds(when.condition, values)]
        own: dict[str, Knob] = {}
        for key, knob in ((key, knob) for when in chosen for key, knob in when.knobs.items()):
            if own.setdefault(key, knob) is not knob:
                raise _set_twice(own[key], knob, variant)
        knobs[phase] = {**knobs.get(phase, {}), **own}
        where[phase] = (*where.get(phase, ()), *(part for when in chosen for part in when.where))
        lines = tuple(line for when in chosen for line in when.listed)
        listed[phase] = lines or tuple(
            {key: knob for key, knob in line.items() if key not in own} for line in listed.get(phase, ())
        )
    return replace(schedule, knobs=knobs, where=where, listed=listed, whens={})


def _set_twice(first: Knob, second: Knob, variant: AnyVariant) -> DiagnosticError:
    assert first.span is not None, "a schedule comes from a file"
    assert second.span is not None, "a schedule comes from a file"
    message = f"'{first.key}' is set twice for variant '{variant.name}'"
    related = (Label(first.span, "first time"),)
    hints = ("both 'when' blocks hold for it; let one of them exclude it",)
    return DiagnosticError(
        [error("E0405", message, second.span, "second time", related=related, hints=hints)]
    )


@overload
def configs(
    schedule: Schedule, phase: Literal["forward"], variant: AnyVariant
) -> tuple[ForwardConfig, ...]: ...
@overload
def configs(
    schedule: Schedule, phase: Literal["backward", "dq", "dkdv"], variant: AnyVariant
) -> tuple[BackwardConfig, ...]: ...
@overload
def configs(
    schedule: Schedule, phase: Literal["gemv", "flat"], variant: AnyVariant
) -> tuple[ProjectionConfig, ...]: ...
@overload
def configs(schedule: Schedule, phase: Phase, variant: AnyVariant) -> tuple[Config, ...]: ...
def configs(schedule: Schedule, phase: Phase, variant: AnyVariant) -> tuple[Config, ...]:
    """Every config of a phase, the default first: a value for each key of the phase, absent keys at their
    defaults.

    The default of `tile.d` is the whole head dimension. A kernel of the backward has the keys of `backward`,
    its own instead of those of the same name, and obeys the conditions of both. Raises DiagnosticError when
    no config satisfies the conditions, and when there are more than MAX_CONFIGS before pruning.
    """
    schedule = schedule_of(schedule, variant)
    phases = (phase,) if (whole := whole_of(phase)) is None else (whole, phase)
    names = {
        key: of
        for part in phases
        for key, of in keys_of(part, _grads(variant)).items()
        if of.target in ("", schedule.target)
    }
    dims = _sizes(variant)
    defaults: dict[str, tuple[Value, ...]] = {
        name: (dims["D"] if name == "tile.d" else key.default,) for name, key in names.items()
    }
    set_beside = {key: knob.choices for part in phases for key, knob in schedule.knobs.get(part, {}).items()}
    said = [
        set_beside | {key: knob.choices for key, knob in line.items()}
        for line in listed_of(schedule, phase) or ({},)
    ]
    # Keys that another target has alone are the planner's to refuse.
    lines = [{name: line.get(name, default) for name, default in defaults.items()} for line in said]
    place = schedule.span or variant.source.span(0, 0)
    if (count := sum(prod(map(len, line.values())) for line in lines)) > MAX_CONFIGS:
        message = f"the {phase} phase has {count} configs before 'where'; the limit is {MAX_CONFIGS}"
        raise DiagnosticError([error("E0509", message, place, "too many to choose from")])
    spend(count)
    every = dict.fromkeys(values for line in lines for values in product(*line.values()))
    points = [dict(zip(defaults, values, strict=True)) for values in every]
    conditions = [condition for part in phases for condition in schedule.where.get(part, ())]
    params: dict[str, Value] = dict(variant.params)
    kind = config_type(phase, names)
    kept = tuple(
        kind.of(point)
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


def projection_configs(schedule: Schedule, variant: ProjectionVariant) -> tuple[ProjectionConfig, ...]:
    """The configs of each implementation, in the order of IMPLS, the default of each first. Its name is the
    value of `impl`; `conventional` has no other keys.
    """
    chosen = schedule_of(schedule, variant)
    made: list[ProjectionConfig] = []
    for impl in impls_of(chosen):
        only = {"impl": Knob(key="impl", choices=(impl,))}
        alone = replace(chosen, knobs={**chosen.knobs, "projection": only})
        made += [ProjectionConfig(impl=impl)] if impl == "conventional" else configs(alone, impl, variant)
    return tuple(made)


def impls_of(schedule: Schedule) -> tuple[Impl, ...]:
    """The implementations that a schedule has, all if it does not say."""
    knob = schedule.knobs.get("projection", {}).get("impl")
    return IMPLS if knob is None else tuple(impl for impl in IMPLS if impl in knob.choices)


def _grads(variant: AnyVariant) -> tuple[str, ...]:
    return variant.attention.grads if isinstance(variant, Variant) else ()


def _sizes(variant: AnyVariant) -> dict[str, Value]:
    """The sizes that conditions may speak of: head dimensions, or N and K where the spec fixes them."""
    if not isinstance(variant, Variant):
        known = {name: variant.projection.size(name) for name in ("N", "K")}
        return {name: size for name, size in known.items() if size is not None}
    dims: dict[str, Value] = {}
    for name, tensor in (("D", variant.attention.q), ("Dv", variant.attention.v)):
        size = tensor.shape[-1]
        assert isinstance(size, Const), "head dimensions of a variant are numbers"
        dims[name] = size.value
    return dims
