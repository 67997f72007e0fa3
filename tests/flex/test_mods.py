"""Every mod of the table: as torch computes it, forward and gradients, or refused by name."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from attnc.build import plan_program
from attnc.flex import FlexError, flex_attention, to_spec
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.flex.mods import CASES, Case, Setting
from tests.flex.oracle import gradients, torch_flex
from tests.targets import TARGETS

#: Cheap, and each unlike the others. HYPOTHESIS_PROFILE=nightly runs all.
EVERY_DAY = {
    "documents_score",
    "learned_window",
    "neighbourhood",
    "distance_of_points",
    "window_of_each_head",
}
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
TODAY = [case for case in CASES if not case.refused and (NIGHTLY or case.name in EVERY_DAY)]


def tensors(setting: Setting, d: int = 16) -> list[torch.Tensor]:
    return [setting.floats(setting.B, setting.H, setting.S, d).requires_grad_() for _ in range(3)]


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize("case", TODAY, ids=lambda case: case.name)
def test_mods_compute_what_torch_computes(case: Case) -> None:
    setting = Setting()
    q, k, v = tensors(setting)
    score_mod, mask_mod = case.make(setting)
    leaves = (q, k, v, *setting.learned)
    o, aux = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_aux=AuxRequest(lse=True))
    learned = bool(setting.learned)
    expected, expected_lse = torch_flex(q, k, v, score_mod, mask_mod, return_lse=True, learned=learned)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
    for found, right in zip(gradients(o, leaves), gradients(expected, leaves), strict=True):
        assert found is not None
        right = torch.zeros(found.shape) if right is None else right
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", TODAY, ids=lambda case: case.name)
def test_mods_plan_for_every_target(case: Case, target: str) -> None:
    setting = Setting()
    score_mod, mask_mod = case.make(setting)
    q = torch.zeros(setting.B, setting.H, setting.S, 64, dtype=torch.float16)
    text = to_spec(score_mod, mask_mod, query=q, key=q, value=q, target=target)
    program = resolve(parse(Source("mods.attn", text)), prelude())
    assert [module.target for module in plan_program(program).modules] == [target]


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=lambda case: case.name)
def test_what_no_spec_can_say_is_refused_by_name(case: Case) -> None:
    setting = Setting()
    with pytest.raises(FlexError) as caught:
        to_spec(*case.make(setting))
    assert case.refused in str(caught.value)
    assert re.search(r"tests/flex/(scores|captures|masks).py:\d+", str(caught.value))
