"""Rows of Hopper's forward do not depend on what other rows of their warp see."""

from __future__ import annotations

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.rerun import FinishedRun
from tests.kernels.test_sm90 import LAZY, SCORE, subject, text_of
from tests.targets import needs_gxx

pytestmark = needs_gxx

EAGER = LAZY.replace("maximum = lazy(20)", "rescale = lazy(8)")
WINDOW = "window(150, 0)"
#: Texts, a row of 130, of 300 keys one that no other row sees, and how large scores are. Keys are walked
#: over from the last to the first: no maximum is looked for where a window begins, and the last key decides
#: whether a row's scores are by a polynomial.
KINDS = {
    "lazy": (text_of(WINDOW), 0, 20, "large"),
    "three": (text_of(WINDOW, schedule=LAZY.replace("consumers = 2", "consumers = 3")), 0, 20, "large"),
    "softcap_window": (text_of(WINDOW, score=f"softcap({SCORE}, 20)"), 0, 20, "large"),
    "softcap": (text_of("causal", score=f"softcap({SCORE}, 20)"), 129, 299, "random"),
    "eager": (text_of("q_idx == 0 or kv_idx != 100", schedule=EAGER), 0, 100, "random"),
}


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_row_sees_leaves_others_as_they_are(kind: str) -> None:
    """The key becomes NaN, or large: its row is computed again, or its maximum moves."""
    text, row, key, logits = KINDS[kind]
    run = FinishedRun.of(subject(text), Case(dims={"B": 1, "H": 1, "M": 130, "N": 300}, logits=logits))
    others = torch.arange(130) != row
    for size in (float("nan"), float("inf"), 1e4, 30.0):
        keys = run.tensor("k").clone()
        keys[:, key] = size * run.tensor("q")[:, row].sign()
        found = run.again({**run.inputs, "k": keys})
        assert not same_bits(found["o"][:, row], run.outputs["o"][:, row])
        assert same_bits(found["o"][:, others], run.outputs["o"][:, others])
        assert same_bits(found["lse"][..., others], run.outputs["lse"][..., others])
