"""Every target has its parts in all layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.model.targets import TARGETS as NAMES
from attnc.plan.device import DEVICES
from attnc.plan.targets import TARGETS, target_of
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
    assert runner_of(name).device(name) in ("cpu", "cuda")
    module = planned(schedule="tile.q = 128, tile.kv = 64", target=name)
    first, *others = render_files(module, path="a.attn", sha256="0")
    assert first == f"{module.variant.name}.py"
    assert all(other.startswith(module.variant.name) for other in others)


def test_a_block_may_take_what_the_devices_of_its_target_allow() -> None:
    tiles = "tile.q = 64, tile.kv = 128, stages = 2"  # 144 KiB at D = 128
    assert planned(schedule=tiles, d=128, target="cuda.sm_80").kernel.shared[0] > 99 << 10
    with pytest.raises(DiagnosticError, match=r"fits cuda\.sm_120"):
        planned(schedule=tiles, d=128, target="cuda.sm_120")


def test_what_is_newer_than_a_target_runs_its_kernels() -> None:
    capabilities = (75, 80, 90, 103, 130)
    assert [TARGETS["cuda.sm_80"].runs_on(one) for one in capabilities] == [False, True, True, True, True]
    assert [TARGETS["cuda.sm_100"].runs_on(one) for one in capabilities] == [False, False, False, True, True]
    alone = replace(TARGETS["cuda.sm_80"], devices=(DEVICES["sm_90"],))
    assert [alone.runs_on(one) for one in capabilities] == [False, False, True, False, False]


def test_a_target_that_is_not_compiled_is_a_mistake_with_names() -> None:
    with pytest.raises(ValueError, match=r"expected one of cuda\.sm_100, .*, triton, got 'cuda\.sm_79'"):
        target_of("cuda.sm_79")
