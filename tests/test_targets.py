"""Every target has its parts in all layers."""

from __future__ import annotations

import pytest

from attnc.model.schedules import TARGETS as NAMES
from attnc.plan.targets import TARGETS
from attnc.runtime.toolchains import toolchain_of
from attnc.target.files import render_files
from attnc.verify.runners import runner_of
from tests.plan.planning import planned


def test_what_is_compiled_can_be_written_in_a_schedule() -> None:
    assert TARGETS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_a_toolchain_a_runner_and_text(name: str) -> None:
    assert TARGETS[name].name == name
    assert TARGETS[name].devices
    assert toolchain_of(name).package in ("triton", "cupy")
    assert runner_of(name).device() in ("cpu", "cuda")
    module = planned(schedule="tile.q = 64, tile.kv = 64", target=name)
    first, *others = render_files(module, path="a.attn", sha256="0")
    assert first == f"{module.variant.name}.py"
    assert all(other.startswith(module.variant.name) for other in others)
