"""Configs that a caller gives, that were measured, and that fit."""

from __future__ import annotations

from typing import Any

import pytest

from attnc.support.configs import check_config, choose_config, decode_configs, encode_configs, shared_on
from attnc.support.devices import CPU
from tests.support.configs import CONFIGS, H200, Config


def test_a_config_is_given_measured_or_fits() -> None:
    tuned = {"NVIDIA H200": ((1024, 2), (None, 1))}
    assert choose_config(CONFIGS[0], H200, 10, CONFIGS, tuned) == CONFIGS[0]
    assert [choose_config(None, H200, n, CONFIGS, tuned) for n in (1024, 1025)] == [CONFIGS[2], CONFIGS[1]]
    assert choose_config(None, H200, 10, CONFIGS, {}) == CONFIGS[1]
    assert choose_config(None, CPU, 10, CONFIGS, {}) == CONFIGS[0]
    assert choose_config(None, H200._replace(shared=1), 10, CONFIGS, {}) == CONFIGS[2]


def test_a_config_says_what_it_needs_of_each_generation() -> None:
    """One number for all would refuse a device that has enough, where another needs more than it has."""
    many = CONFIGS[0]._replace(shared=((8, 242688), (9, 231424), (10, 306176)))
    configs = (many, *CONFIGS[1:])
    assert [shared_on(many, major) for major in (8, 9, 10, 11)] == [242688, 231424, 306176, 306176]
    assert choose_config(None, H200, 10, configs, {}) == many
    for major in (8, 10, 11):
        other = H200._replace(name="another", capability=(major, 0))
        assert choose_config(None, other, 10, configs, {}) == CONFIGS[1]
    check_config(many, Config)
    assert decode_configs(encode_configs(many, None), Config) == (many, {})
    wrong: list[Any] = [(1, 2), ((9, 0.5),), ((9,),), "9"]
    for shared in wrong:
        with pytest.raises(TypeError, match="config: expected one of CONFIGS, got"):
            check_config(many._replace(shared=shared), Config)


def test_a_choice_of_configs_survives_as_text() -> None:
    assert encode_configs(None, None) == ""
    assert decode_configs("", Config) == (None, {})
    text = encode_configs(CONFIGS[1], {"dq": CONFIGS[0], "dkdv": None})
    assert decode_configs(text, Config) == (CONFIGS[1], {"dq": CONFIGS[0]})
