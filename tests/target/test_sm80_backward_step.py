"""What a step of a kernel of gradients tests and multiplies by, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.resources import resource
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import CudaBackwardText
from attnc.target.sm80.backward_step import WarpShare
from tests.plans import module_of


def text_of(spec: str, variant: str | None = None) -> CudaBackwardText:
    module = module_of(spec, "cuda.sm_80", variant)
    arguments = ArgumentText(module)
    return CudaBackwardText(module, arguments, next(iter(module.backward_kernels.values())))


@pytest.mark.parametrize(("spec", "mode"), [("forgetting", "each"), ("causal_gqa", "after")])
def test_the_mask_is_tested_where_sums_need_it(spec: str, mode: str) -> None:
    assert text_of(spec).mask.mode == mode


def test_a_condition_of_several_parts_is_an_operand_in_brackets() -> None:
    document, full = text_of("prefix_document").mask, text_of("full").mask
    assert document.operand == f"({document.condition})"
    assert full.operand == full.condition


def test_dv_has_no_factor_of_the_score() -> None:
    factors = text_of("causal_gqa").factors
    assert factors.of("dv") == "1.0f"
    assert factors.of("dq") != "1.0f"
    assert factors.of_ds == ""


def test_warps_that_exchange_begin_at_their_own_query() -> None:
    apart, together = (WarpShare(exchange=x, turns_columns=False) for x in (False, True))
    assert (apart.kind, apart.first_column) == ("alone", "")
    assert (together.kind, together.first_column) == ("exchange", "first_query + ")


def test_warps_sum_their_share_of_a_gradient() -> None:
    alone = WarpShare(exchange=False, turns_columns=False)
    found = {
        share.sizes_from: (share.is_whole("DV"), share.first_of("DV"))
        for share in (alone, replace(alone, exchange=True), replace(alone, sliced=True))
    }
    assert found == {
        "cuda/_sizes_alone_kv.cu.jinja": ("true", "0"),
        "cuda/_sizes_exchange_kv.cu.jinja": ("WHOLE_DV", "part * DV_COLUMNS"),
        "cuda/_sizes_slices_kv.cu.jinja": ("WHOLE_DV", "slice * DV_COLUMNS"),
    }
    assert all((resource("templates") / path).exists() for path in found)
