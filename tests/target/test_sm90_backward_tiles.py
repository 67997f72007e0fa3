"""The texts of Hopper's kernels of gradients."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.target.files import render_files
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90BackwardText, template_of
from tests.plan.test_sm90_backward import planned
from tests.plan.test_sm90_latent import planned as planned_latent


def texts_of(module: Module) -> dict[str, Sm90BackwardText]:
    """The texts of the kernels of wgmma, by what they make."""
    arguments = Sm90Arguments(module)
    assert module.backward is not None
    return {kernel.kind: Sm90BackwardText(module, arguments, kernel) for kernel in module.backward.kernels}


@pytest.mark.parametrize(("score", "factor"), [("dot(q, k) / 8", "0.125f"), ("dot(q, k)", "")])
def test_ds_has_the_factor_of_the_score(score: str, factor: str) -> None:
    """It is not left to the end, for p^T do is in the same sum."""
    text = texts_of(planned_latent(score=score))["dk"]
    assert text.factors.of_ds == factor
    assert text.chain.slope is None


def test_each_kernel_has_its_template() -> None:
    module = planned_latent()
    latent = {kind: template_of(text) for kind, text in texts_of(module).items()}
    assert latent == {
        "dq": ("sm90/backward_latent_dq", "sm90/latent_module"),
        "dk": ("sm90/backward_latent_dk", "sm90/latent_module"),
    }
    others = {kind: template_of(text) for kind, text in texts_of(planned(accumulate="two_pass")).items()}
    assert others == {
        "dq": ("sm90/backward_dq", "sm90/backward_module"),
        "dkdv": ("sm90/backward_dkdv", "sm90/backward_module"),
    }
    text = render_files(module, path="a.attn", sha256="")["default_backward_dk.cu"]
    assert "args.stride_dkn + 64 * FIRST_PANELS" in text


def test_tiles_ascend_over_queries_or_from_the_last_turn() -> None:
    texts = texts_of(planned(accumulate="two_pass"))
    assert {kind: text.loop.ascends for kind, text in texts.items()} == {"dq": True, "dkdv": False}


@pytest.mark.parametrize(
    ("d", "stored", "sum_of_dq"), [(72, "72", "(const float (&)[72 / 8][4])dq"), (64, "D", "dq")]
)
def test_padded_columns_are_not_stored(d: int, stored: str, sum_of_dq: str) -> None:
    module = planned(d=d, accumulate="two_pass")
    assert texts_of(module)["dkdv"].wgmma.stored_columns("dk") == stored
    text = render_files(module, path="a.attn", sha256="")["default_backward_dq.cu"]
    assert f"store_row(to, row < args.M, {sum_of_dq}, r, " in text


def test_dq_is_never_added_to_in_memory_as_it_leaves() -> None:
    assert "dq" not in texts_of(planned(accumulate="two_pass"))["dq"].sums_kept
