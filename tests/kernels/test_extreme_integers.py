"""Integers at the ends of their types: an i32 input has the whole range of i32, an i64 input that of i64.

`right = 2^31 - 1` is what callers pass for "no window". Sums with it leave 32 bits, and bounds of loops that
follow from them must not wrap around: over pages they would ask for entries before the table.
"""

from __future__ import annotations

import pytest
import torch

from attnc.expr.nodes import Expr, walk
from attnc.plan.ir import Let, statement_expressions
from attnc.plan.width import is_wide
from attnc.verify.case import Case
from attnc.verify.problem import build
from tests.kernels.extreme_integers import DECODE, KV_Q, MASKS, PAGED, choices, right_at, subject, text
from tests.targets import TARGETS, skip_without_compiler
from tests.verify.judging import modules_of

CASE = Case(dims={"B": 1, "M": 21, "N": 37, "H": 1}, seed=4)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MASKS)
def test_rows(name: str) -> None:
    made = subject(name, "loops = [q, kv]", "triton")
    for values in choices(name):
        right_at(made, values, CASE)


def test_comparisons_saturate_beyond_64_bits() -> None:
    """What leaves 64 bits is not defined; one far integer beside positions counts as far all the same."""
    made = subject("of 64 bits", "loops = [q, kv]", "triton")
    problem = build(made.variant.attention, CASE)
    found = []
    for far in (2**63 - 1, 2**62):
        o = torch.empty_like(problem.outputs["o"])
        made.run({**problem.inputs, "left": far, "right": far}, {"o": o})
        found.append(o)
    assert torch.equal(*found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["right", "window", "of a key"])
def test_keys_outside(name: str) -> None:
    made = subject(name, KV_Q, "triton")
    for values in choices(name):
        right_at(made, values, CASE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["window", "of a row", "of 64 bits"])
def test_gradients(name: str) -> None:
    made = subject(name, "loops = [q, kv]", "triton", "grad q, k, v")
    for values in choices(name)[:3]:
        right_at(made, values, CASE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["right", "window"])
def test_pages_shared_out(name: str) -> None:
    made = subject(name, DECODE, "triton", tensors=PAGED)
    case = Case(dims={"B": 2, "M": 2, "N": 70, "H": 1}, seed=3)
    for values in choices(name):
        right_at(made, values, case)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("right", "pages"),
        ("window", "gradients"),
        ("of 64 bits", "rows"),
        ("two of them", "rows"),
        ("window", KV_Q),
    ],
)
def test_cuda(name: str, kind: str) -> None:
    skip_without_compiler("cuda.sm_80")
    case = CASE
    match kind:
        case "pages":
            made = subject(name, DECODE, "cuda.sm_80", tensors=PAGED)
            case = Case(dims={"B": 2, "M": 2, "N": 70, "H": 1}, seed=3)
        case "gradients":
            made = subject(name, "loops = [q, kv]", "cuda.sm_80", "grad q, k, v")
        case "rows":
            made = subject(name, "loops = [q, kv]", "cuda.sm_80")
        case schedule:
            made = subject(name, schedule, "cuda.sm_80")
    for values in choices(name):
        right_at(made, values, case)


@pytest.mark.slow
def test_queries_far_before_the_keys_on_cuda() -> None:
    """Shares of no key are empty, not of fewer: the first row of one would stand before the table."""
    skip_without_compiler("cuda.sm_80")
    made = subject("right", DECODE, "cuda.sm_80", tensors=PAGED)
    right_at(made, {"right": 0}, Case(dims={"B": 1, "M": 500, "N": 3, "H": 1}, seed=3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["right", "window", "of 64 bits", "of a head", "of a row", "of a key"])
def test_masks_stay_in_32_bits(name: str, target: str) -> None:
    """One far integer is brought near where it is loaded; no element and no bound is computed in 64 bits."""
    (module,) = modules_of(text(name, "loops = [q, kv]", target))
    kernel = module.kernel
    assert kernel.step.keep is not None
    assert not is_wide_anywhere(kernel.step.keep)
    # but for where a list of blocks begins, which is an address
    found = (
        item for item in kernel.regions.bounds if not (isinstance(item, Let) and item.name == "list_line")
    )
    bounds = (expr for item in found for expr in statement_expressions(item))
    assert not any(map(is_wide_anywhere, bounds))


def is_wide_anywhere(expr: Expr) -> bool:
    return any(map(is_wide, walk(expr)))
