"""Every target has its parts in all layers."""

from __future__ import annotations

import pytest

from attnc.build import front
from attnc.plan.targets import TARGETS, schedule_for, target_of
from attnc.runtime.toolchains import toolchain_of
from attnc.target.files import render_files
from attnc.verify.runners import runner_of
from tests.plan.planning import planned
from tests.plans import SPECS


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


@pytest.mark.parametrize(("deterministic", "way"), [(True, "ordered"), (False, "atomic")])
def test_variants_sum_dq_each_in_its_way(deterministic: bool, way: str) -> None:
    program = front(SPECS / "causal_gqa.attn")
    text = schedule_for(program, "causal_gqa", "cuda.sm_90a", deterministic=deterministic)
    found = [line.split("{")[0].split()[1:] for line in text.splitlines() if f"accumulate.dq = {way}" in line]
    conditions = {" ".join(words) for words in found}
    assert conditions == {f"T == {dtype} and D == {d}" for dtype in ("bf16", "f16") for d in (64, 128)}
