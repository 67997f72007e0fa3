"""Every target has its parts in all layers."""

from __future__ import annotations

import pytest

from attnc.plan.targets import TARGETS, target_of
from attnc.runtime.toolchains import toolchain_of
from attnc.target.files import render_files
from attnc.verify.runners import runner_of
from tests.plan.planning import planned


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


def test_a_target_that_is_not_compiled_is_a_mistake_with_names() -> None:
    with pytest.raises(ValueError, match=r"expected one of cuda\.sm_100, .*, triton, got 'cuda\.sm_79'"):
        target_of("cuda.sm_79")
