"""The configs of a phase have a field for every key that it has, of the type of its values."""

from __future__ import annotations

import typing

import pytest

from attnc.model.knobs import keys_of
from attnc.model.schedule import (
    PHASES,
    PROJECTION_PHASES,
    BackwardConfig,
    Config,
    DkDvConfig,
    ForwardConfig,
    Phase,
    Value,
    config_type,
)
from attnc.model.targets import TARGETS


def defaults(phase: Phase, target: str) -> dict[str, Value]:
    phases: tuple[Phase, ...] = ("backward", phase) if phase in ("dq", "dkdv") else (phase,)
    phases = ("projection", phase) if phase in ("gemv", "flat") else phases
    keys = {key: of for part in phases for key, of in keys_of(part, ("q", "k")).items()}
    return {key: of.default for key, of in keys.items() if of.target in ("", target)}


def kind(phase: Phase, target: str) -> type[Config]:
    return config_type(phase, defaults(phase, target))


@pytest.mark.parametrize("target", ["triton", "cuda.sm_90a"])
@pytest.mark.parametrize("phase", [*PHASES, *PROJECTION_PHASES])
def test_every_key_is_a_field_of_its_phase(phase: Phase, target: str) -> None:
    assert target in TARGETS
    point = defaults(phase, target)
    config = kind(phase, target).of(point)
    assert config.values() == point
    assert sorted(config.texts()) == sorted(point)
    assert config == kind(phase, target).of(point)
    assert hash(config) == hash(kind(phase, target).of(point))
    hints = typing.get_type_hints(type(config))
    for field in type(config).__dataclass_fields__:
        if field != "accumulates":
            assert _is_of(getattr(config, field), hints[field]), field


def _is_of(value: object, hint: typing.Any) -> bool:
    """Whether a value is of the type that a field says."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, typing.get_args(hint)[0]) for item in value)
    options = typing.get_args(hint) or (hint,)
    return any(_is_of(value, x) if typing.get_args(x) else type(value) is x for x in options)


def test_a_phase_has_no_field_of_another() -> None:
    with pytest.raises(TypeError, match="consumers"):
        ForwardConfig.of(defaults("forward", "cuda.sm_90a"))


def test_gradients_are_summed_as_the_schedule_says() -> None:
    said: dict[str, Value] = {"accumulate.dq": "sequential", "accumulate.dk": "atomic"}
    config = BackwardConfig.of({**defaults("backward", "triton"), **said})
    assert config.texts()["accumulate.dq"] == "sequential"
    assert [config.accumulate(name) for name in "qk"] == ["sequential", "atomic"]
    with pytest.raises(KeyError):
        config.accumulate("v")


def test_what_a_schedule_calls_none_is_none() -> None:
    config = DkDvConfig.of(defaults("dkdv", "triton"))
    assert config.maxnreg is None
    assert config.texts()["maxnreg"] == config.value("maxnreg") == "none"
    changed = config.with_keys({"maxnreg": 168, "tile.kv": 32})
    assert (changed.value("maxnreg"), changed.value("tile.kv")) == (168, 32)
    assert changed.with_keys({"maxnreg": "none", "tile.kv": 64}) == config
