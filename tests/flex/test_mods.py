"""Every mod of the table: as torch computes it, forward and gradients, or refused by the name of an operation."""

from __future__ import annotations

import os

import pytest
import torch

from attnc.flex import FlexError, flex_attention, to_spec
from tests.flex.mods import CASES, Case, Setting
from tests.flex.oracle import gradients, torch_flex

SAID = [case for case in CASES if not case.refused]
#: Cheap, and each unlike the others. HYPOTHESIS_PROFILE=nightly runs all.
EVERY_DAY = {
    "documents_score",
    "learned_window",
    "neighbourhood",
    "distance_of_points",
    "window_of_each_head",
}
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def tensors(setting: Setting, d: int = 16) -> list[torch.Tensor]:
    return [setting.floats(setting.B, setting.H, setting.S, d).requires_grad_() for _ in range(3)]


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize(
    "case", [case for case in SAID if NIGHTLY or case.name in EVERY_DAY], ids=lambda case: case.name
)
def test_mods_compute_what_torch_computes(case: Case) -> None:
    setting = Setting()
    q, k, v = tensors(setting)
    score_mod, mask_mod = case.make(setting)
    leaves = (q, k, v, *setting.learned)
    o, lse = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_lse=True)
    expected, expected_lse = torch_flex(q, k, v, score_mod, mask_mod, return_lse=True)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
    for found, right in zip(gradients(o, leaves), gradients(expected, leaves), strict=True):
        assert found is not None
        right = torch.zeros(found.shape) if right is None else right
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=lambda case: case.name)
def test_what_no_spec_can_say_is_refused_by_name(case: Case) -> None:
    setting = Setting()
    with pytest.raises(FlexError) as caught:
        to_spec(*case.make(setting))
    assert case.refused in str(caught.value)
    assert "tests/flex/mods.py:" in str(caught.value)
