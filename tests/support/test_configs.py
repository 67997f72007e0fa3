"""Configs that a caller gives, that were measured, and that fit."""

from __future__ import annotations

from attnc.support.configs import choose_config, decode_configs, encode_configs
from attnc.support.devices import CPU
from tests.support.configs import CONFIGS, H200, Config


def test_a_config_is_given_measured_or_fits() -> None:
    tuned = {"NVIDIA H200": ((1024, 2), (None, 1))}
    assert choose_config(CONFIGS[0], H200, 10, CONFIGS, tuned) == CONFIGS[0]
    assert [choose_config(None, H200, n, CONFIGS, tuned) for n in (1024, 1025)] == [CONFIGS[2], CONFIGS[1]]
    assert choose_config(None, H200, 10, CONFIGS, {}) == CONFIGS[1]
    assert choose_config(None, CPU, 10, CONFIGS, {}) == CONFIGS[0]
    assert choose_config(None, H200._replace(shared=1), 10, CONFIGS, {}) == CONFIGS[2]


def test_a_choice_of_configs_survives_as_text() -> None:
    assert encode_configs(None, None) == ""
    assert decode_configs("", Config) == (None, {})
    text = encode_configs(CONFIGS[1], {"dq": CONFIGS[0], "dkdv": None})
    assert decode_configs(text, Config) == (CONFIGS[1], {"dq": CONFIGS[0]})
