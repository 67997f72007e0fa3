"""A config has a property for every key, so that none is read by a string outside of generic code."""

from __future__ import annotations

import pytest

from attnc.model.knobs import KEYS, PROJECTION_KEYS
from attnc.model.schedule import Config

#: Keys whose property says what they mean, or that nothing reads but conditions.
OTHERWISE = {"order": "longest_first", "pack": "packs_heads", "tile.d": None, "impl": None}


@pytest.mark.parametrize("name", [*KEYS, *PROJECTION_KEYS])
def test_every_key_has_a_property(name: str) -> None:
    field = OTHERWISE.get(name, name.replace(".", "_"))
    if field is not None:
        key = {**PROJECTION_KEYS, **KEYS}[name]
        assert hasattr(Config(values={name: key.default}), field)
        with pytest.raises(KeyError):
            getattr(Config(values={}), field)


def test_gradients_are_summed_as_the_schedule_says() -> None:
    config = Config(
        values={"accumulate.dq": "sequential", "accumulate.dk": "atomic", "accumulate.dv": "two_pass"}
    )
    assert [config.accumulate(name) for name in "qkv"] == ["sequential", "atomic", "two_pass"]
