"""Which products Hopper's kernels for gradients share between two warpgroups, and how."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.plan.sm90.backward import Sm90Backward
from attnc.target.files import render_files
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90BackwardText
from attnc.target.sm90.latent import LatentProducts
from tests.plan.test_sm90_backward import planned as planned_backward
from tests.plan.test_sm90_latent import of_wide_heads, planned
from tests.verify.judging import modules_of

SIZES = [(128, 64), (192, 128), (320, 256), (576, 256), (576, 512)]


def text_of_kernel(module: Module, kernel: str) -> Sm90BackwardText:
    (found,) = (item for item in module.backward_kernels.values() if item.kind == kernel)
    made = Sm90BackwardText(module, Sm90Arguments(module), found)
    assert made.frame == "sm90/latent_module"
    return made


def products_of(module: Module, kernel: str) -> LatentProducts:
    found = text_of_kernel(module, kernel).latent
    assert found is not None
    return found


@pytest.mark.parametrize("kernel", ["dq", "dk"])
@pytest.mark.parametrize(("d", "dv"), SIZES)
def test_every_column_is_multiplied_once(kernel: str, d: int, dv: int) -> None:
    """A warpgroup's part begins at its own first panel, and no product crosses the end of the values."""
    text = products_of(planned(d=str(d), dv=str(dv)), kernel)
    shares = (0, text.first_panels * 64)
    for parts, columns in ((text.q_parts, d), (text.do_parts, dv)):
        found: list[int] = []
        for start, share in zip(shares, parts, strict=True):
            for fragment, width, panel in share:
                first = panel * 64
                assert first - start == fragment * 8
                assert width <= 256
                assert not first < dv < first + width
                found += range(first, first + width)
        assert found == list(range(columns))


def test_sums_of_576_columns_are_of_three_products() -> None:
    text = products_of(planned(), "dk")
    assert text.q_parts == [[(0, 256, 0)], [(0, 256, 4), (32, 64, 8)]]
    assert text.do_parts == [[(0, 256, 0)], [(0, 256, 4)]]


@pytest.mark.parametrize(("score", "factor"), [("dot(q, k) / 8", "0.125f"), ("dot(q, k)", "")])
def test_ds_has_the_factor_of_the_score(score: str, factor: str) -> None:
    """It is not left to the end, for p^T do is in the same sum."""
    text = text_of_kernel(planned(score=score), "dk")
    assert text.latent is not None
    assert text.latent.ds_factor == factor
    assert text.chain.slope is None


def test_each_kernel_has_its_template() -> None:
    module = planned()
    rows, keys = text_of_kernel(module, "dq"), text_of_kernel(module, "dk")
    assert (rows.template, keys.template) == ("backward_latent_dq", "backward_latent_dk")
    text = render_files(module, path="a.attn", sha256="")["default_backward_dk.cu"]
    assert "args.stride_dkn + 64 * FIRST_PANELS" in text


def test_other_gradients_have_the_text_of_other_kernels() -> None:
    module = planned_backward(accumulate="two_pass")
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    for planned_kernel in module.backward.kernels:
        made = Sm90BackwardText(module, Sm90Arguments(module), planned_kernel)
        assert made.frame == "sm90/backward_module"
        assert made.latent is None


@pytest.mark.parametrize(("kernel", "columns"), [("dq", 384), ("dk", 384), ("dv", 512)])
def test_sums_of_wide_heads_are_of_one_tensor(kernel: str, columns: int) -> None:
    (module,) = modules_of(of_wide_heads(d="384", dv="512"))
    text = products_of(module, kernel)
    parts, others = (text.do_parts, text.q_parts) if kernel == "dv" else (text.q_parts, text.do_parts)
    assert others == [[], []]
    assert [64 * panel for share in parts for _, _, panel in share] == [0, columns // 2]
    assert sum(width for share in parts for _, width, _ in share) == columns
    assert text.ds_factor == ""
    assert (text.pieces, text.makes_dv) == ((0, True) if kernel == "dv" else (6, False))
