"""What tools/bench/forms.py times: texts that say the same but for the gate, and its rows."""

import pytest

from attnc.plan.targets import USUAL
from tests.model.resolving import resolve_text
from tools.bench.forms import gate_texts, shown


@pytest.mark.parametrize("mask", ["causal", "true"])
def test_a_gate_is_all_that_differs(mask: str) -> None:
    texts = gate_texts(64, mask)
    programs = {name: resolve_text(text) for name, text in texts.items()}
    bare, gated = (programs[name].attention("gated") for name in ("without", "with a gate"))
    assert bare.epilogue is None
    assert gated.epilogue is not None
    assert {x.name for x in gated.inputs} - {x.name for x in bare.inputs} == {"gate"}
    assert bare.mask == gated.mask
    assert {x.target for x in programs["without"].schedules} == {*USUAL}


def test_a_row_says_what_a_gate_adds_or_how_fast_products_are() -> None:
    assert shown("x", {"without": 200.0, "with a gate": 203.0, "torch.mul": 26.0}, 0.0) == (
        "| x | 200.0 | 203.0 | 26.0 | +1.5 % |"
    )
    products = 128 * 4096**2 * (576 + 512) / 1e12  # causal: half of two products of twice as many FLOPs
    row = shown("h128 n4096", {"forward": 3848.0, "gradients": 19453.0}, products)
    assert row == "| h128 n4096 | 3,848.0 | 19,453.0 | 607 | 304 |"
