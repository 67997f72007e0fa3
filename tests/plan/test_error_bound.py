"""The bound of f32 covers what tensor cores cut off, on every target."""

import math
from collections.abc import Sequence

import pytest

from attnc.plan import ir
from attnc.plan.error_bound import THREE_PARTS_ERROR, TWO_PARTS_ERROR
from tests.plans import plans_of

U = 2.0**-24


def wide_f32() -> list[ir.Module]:
    return [m for m in plans_of("f32").modules if m.variant.params["D"] == 128]


def cut(x: float, unit: float) -> float:
    return math.trunc(x / unit) * unit


def sum_on_tensor_cores(products: Sequence[float]) -> float:
    """Four products and the sum before at once, cut to one bit more than a float has beside the largest of
    them, and then to a float (Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 2021).
    """
    total = 0.0
    for i in range(0, len(products), 4):
        addends = [total, *products[i : i + 4]]
        largest = 2.0 ** math.floor(math.log2(max(map(abs, addends))))
        total = sum(cut(x, largest * U) for x in addends)
        total = cut(total, 2.0 ** math.floor(math.log2(abs(total))) * 2 * U)
    return total


@pytest.mark.parametrize("module", wide_f32(), ids=lambda module: str(module.target))
def test_the_bound_covers_what_tensor_cores_cut_off(module: ir.Module) -> None:
    """Products that lose almost a unit each, and every sum another: beyond (D + 3) u and the error of the
    products, which rounding to nearest keeps to.
    """
    bound = module.kernel.bound
    almost = 1 - 2.0**-10
    small = [(1 + almost) * U] * 3 + [almost * U]
    products = [1.0, 0.0, 0.0, 0.0, *small * (bound.head_dim // 4 - 1)]
    lost = abs(sum_on_tensor_cores(products) - math.fsum(products))
    assert lost > (bound.head_dim + 3) * U + bound.product_error
    assert lost <= bound.dot_error(bound.head_dim) * math.fsum(map(abs, products))


@pytest.mark.parametrize(("parts", "error"), [(2, TWO_PARTS_ERROR), (3, THREE_PARTS_ERROR)])
def test_a_float_in_parts_is_as_close_as_is_said(parts: int, error: float) -> None:
    """All but the last part are cut off behind eight bits, the last is rounded there."""
    worst = 0.0
    for mantissa in range(1 << 24, (1 << 25) - 1, 4099):
        x, total = mantissa * 2.0**-24, 0.0
        for part in range(parts):
            left = x - total
            unit = 2.0 ** (math.floor(math.log2(left)) - 7) if left > 0 else 1.0
            total += unit * (round(left / unit) if part == parts - 1 else math.floor(left / unit))
        worst = max(worst, abs(x - total) / x)
    assert 0.9 * error < worst <= error
