"""What products begin with, in the form that Triton makes of kernels: ptxas takes elements of one that begins
with a constant other than 0 for that constant.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.processes import compiling
from tests.profiles import is_night
from tests.verify.judging import examples, spec
from tests.verify.random_specs import specs

pytest.importorskip("triton", reason="compiles the kernels")

FOUND = Path(__file__).parents[1] / "gpu" / "found_specs" / "constant_added_to_the_product.attn"
#: A constant is added to the product, or to what compilers find to be the product.
SCORES = (
    "tanh(1 + dot(q, k))",
    "tanh(dot(q, k) - -0.5)",
    "dot(q, k) * (dot(q, k) + 1e-40)",
    "abs(dot(q, k) + max(0.5, min(1.5, 3)))",
    "abs(dot(q, k) * min(1.0, 2) + 0.5)",
    "abs(dot(q, k) * 1e-60 * 1e60 + 0.5)",
    "abs(dot(q, k) / 0.99999999 + 0.5)",
    "abs(dot(q, k) - 1e-60 + 0.5)",
    "abs(max(dot(q, k), -inf) + 0.5)",
    "abs(0.5 + min(inf, dot(q, k)))",
)
#: Prints how many products the kernels of the specs that it reads have, and the constants, 0 apart, that some
#: of them begin with.
PROGRAM = r"""
import json, re, sys
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import triton_kernel
from tests.verify.judging import modules_of
count, found = 0, []
for text in json.load(sys.stdin):
    for module in modules_of(text):
        for which in module.kernels if module.target == "triton" else ():
            lines = triton_kernel(module, which, 0, DEVICES["sm_90"]).lower()["ttir"]
            constants = dict(re.findall(r"(%\S+) = arith\.constant dense<(\S+)>", lines))
            products = re.findall(r"tt\.dot %\S+, %\S+, (%[^, ]+)", lines)
            count += len(products)
            begun = {constants[name] for name in products if name in constants}
            found += [[text, which, value] for value in begun if value != "0.000000e+00"]
print(json.dumps([count, found]))
"""


def _spec(score: str) -> str:
    lines = (
        "input q: f16[B, M, H, 64]",
        "input k, v: f16[B, N, H, 64]",
        f"score = {score}",
        "normalize = softmax",
        "output o: f16[B, M, H, 64]",
        "grad q, k, v",
    )
    return spec(lines, "tile.q = 64, tile.kv = 64")


@pytest.mark.slow
def test_products_begin_with_no_constant() -> None:
    drawn: list[str] = []

    @settings(max_examples=examples(1))
    @given(specs(wide=True))
    def draw(text: str) -> None:
        drawn.append(text)

    draw()
    scores = SCORES if is_night() else SCORES[::8]
    texts = [*map(_spec, scores), FOUND.read_text(encoding="utf-8"), *drawn]
    count, found = json.loads(compiling(PROGRAM, stdin=json.dumps(texts)).stdout)
    assert found == []
    assert count >= 7 * (len(scores) + 1)  # 2 of a forward, 3 and 4 of its gradients


@pytest.mark.slow
def test_one_that_does_is_found() -> None:
    """The sum with -inf is -inf, so that it is no error."""
    _, found = json.loads(compiling(PROGRAM, stdin=json.dumps([_spec("dot(q, k) + log(0)")])).stdout)
    assert {value for _, _, value in found} == {"0xFF800000"}
