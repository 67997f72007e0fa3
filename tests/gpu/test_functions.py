"""The functions of scores on a GPU: both targets within their bounds, and each function within its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Call, Dot
from attnc.plan.error_bound import INTRINSICS
from attnc.runtime.loader import load_text
from attnc.target.triton.printer import SYNTAX
from tests.kernels.test_functions import SCORES, STYLES, scored, small
from tests.targets import TARGETS
from tests.verify.judging import assert_within_bound

COUNT = 1 << 20
#: Arguments at which a function is a normal number.
RANGES = {
    "exp": (-87.0, 88.0), "exp2": (-125.0, 127.0), "log": (1e-30, 1e30), "log2": (1e-30, 1e30),
    "sigmoid": (-87.0, 30.0), "erf": (-6.0, 6.0), "sqrt": (1e-30, 1e30),
}  # fmt: skip
#: One launch of one function; the rest of a kernel would hide its errors.
KERNEL = """import triton
import triton.language as tl


@triton.jit
def apply(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, {function}(tl.load(x + at)))
"""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, target: str) -> None:
    made = scored(SCORES[name], target, "f16" if name == "clamped" else "f32")
    for style in STYLES:
        assert_within_bound(made, replace(small(**style), dims={"B": 2, "M": 333, "N": 521, "H": 3}))


@pytest.mark.parametrize("name", RANGES)
def test_a_function_of_triton_keeps_its_error(name: str) -> None:
    """As `plan.error_bound` states it; what exp loses with its argument is added by the analysis."""
    low, high = RANGES[name]
    spread = np.geomspace(low, high, COUNT) if low > 0 else np.linspace(low, high, COUNT)
    x = torch.from_numpy(spread.astype(np.float32)).cuda()
    y = torch.empty_like(x)
    load_text(KERNEL.format(function=SYNTAX.named(name))).apply[(COUNT // 1024,)](x, y, BLOCK=1024)
    exact = x.double().cpu().numpy()
    want = evaluate(Call(name, (Dot(),)), Env(dot=exact))
    relative, absolute = {entry: errors for entry, *errors in INTRINSICS}[name]
    if name == "exp":
        relative += 2.0**-23 * np.abs(exact)
    if name == "sigmoid":
        relative += (1 - want) * (2.0**-22 + 2.0**-23 * np.abs(exact))
    ratio = np.abs(y.double().cpu().numpy() - want) / (relative * np.abs(want) + absolute + 2.0**-126)
    assert ratio.max() <= 1, f"{name} at {exact[ratio.argmax()]}: {ratio.max():.2f} of the bound"
