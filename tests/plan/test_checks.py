"""What a target cannot lower is refused before it is planned."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError
from tests.plan import planning
from tests.refusals import refused


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("consumers = 2", "'consumers' is no key of"),
        ("overlap = false", "'overlap' is no key of"),
        ("cluster = 2", "'cluster' is no key of"),
        ("pingpong = true", "'pingpong' is no key of"),
        ("registers = 232", "'registers' is no key of"),
        ("softmax = online(maximum = lazy(20))", "a lazy maximum is not lowered to this target"),
    ],
)
def test_other_targets_refuse_what_is_hoppers(schedule: str, said: str, target: str) -> None:
    found = refused(planning.planned, schedule=f"  {schedule}", target=target)
    assert (found.code, found.message.startswith(said)) == ("E0602", True)


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("loops = [kv, q], pack = gqa", "loops = [kv, q] cannot pack or split"),
        ("pack = gqa, persistent = true", "the decode kernel is not persistent"),
        ("pack = gqa, order = longest_first", "the decode kernel has no order of q tiles"),
        ("loops = [kv], pack = gqa, order = longest_first", "the decode kernel has no order of q tiles"),
    ],
)
def test_decode_kernels_refuse_each_setting_whatever_else_is_said(
    schedule: str, said: str, target: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        planning.planned(schedule=f"  {schedule}", target=target, d=128)
    assert said in [found.message for found in caught.value.diagnostics]
