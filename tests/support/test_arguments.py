"""Numbers that are passed for scalars, and what is said first of a wrong tensor."""

from __future__ import annotations

import math
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch

from attnc.support.arguments import check_tensor, plain_number, require_contiguous_rows, scalar_tensor

pytestmark = pytest.mark.quick

LIKE = torch.zeros(1)


@pytest.mark.parametrize("number", [1e39, -(10**400), 3.5e38])
def test_a_number_beyond_the_type_is_refused_by_name(number: float) -> None:
    like = torch.zeros(1)
    with pytest.raises(ValueError, match=r"^cap: expected a number that fits torch.float32, got -?[13]"):
        scalar_tensor("cap", number, torch.float32, like, "q")


@pytest.mark.parametrize("number", [math.inf, -math.inf, 3.4e38, True])
def test_a_number_of_the_type_is_taken(number: float) -> None:
    assert scalar_tensor("cap", number, torch.float32, torch.zeros(1), "q").item() == pytest.approx(
        float(number)
    )


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (np.float32(0.5), torch.float32),
        (np.float64(0.5), torch.float32),
        (np.float16(0.5), torch.float32),
        (np.int64(3), torch.int32),
        (np.uint8(3), torch.float32),
        (np.bool_(True), torch.int32),
        (np.array(3), torch.int64),
    ],
)
def test_numbers_of_numpy_are_taken(number: Any, dtype: torch.dtype) -> None:
    found = scalar_tensor("cap", plain_number(number, dtype, LIKE), dtype, LIKE, "q")
    assert (found.dtype, found.shape, found.item()) == (dtype, (), float(number))


@pytest.mark.parametrize("number", [np.float32(1.5), np.complex64(1), np.array([3]), np.str_("3")])
def test_what_is_no_integer_of_numpy_is_none(number: Any) -> None:
    with pytest.raises(TypeError, match=r"^n: expected an integer or a 0-d tensor, got "):
        scalar_tensor("n", plain_number(number, torch.int32, LIKE), torch.int32, LIKE, "q")


def test_another_number_of_axes_is_said_before_the_type() -> None:
    x = torch.zeros(2, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^q: expected shape \[any, any, 3\], got \[2, 3\]"):
        check_tensor("q", x, torch.float32, (None, None, 3), x)
    with pytest.raises(TypeError, match=r"^q: expected dtype torch.float32"):
        check_tensor("q", x, torch.float32, (5, 5), x)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (0, torch.uint8),
        (255, torch.uint8),
        (-128, torch.int8),
        (127, torch.int8),
        (-(1 << 63), torch.int64),
        (True, torch.bool),
        (0, torch.bool),
    ],
)
def test_integers_from_the_least_to_the_largest_are_taken(number: int, dtype: torch.dtype) -> None:
    made = scalar_tensor("most", number, dtype, torch.zeros(1), "q")
    assert made.dtype == dtype
    assert made.item() == number


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(-1, torch.uint8), (256, torch.uint8), (128, torch.int8), (1 << 31, torch.int32)],
)
def test_integers_beyond_the_type_are_refused(number: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"^most: expected a number that fits {dtype}, got {number}$"):
        scalar_tensor("most", number, dtype, torch.zeros(1), "q")


def test_what_is_neither_true_nor_false_is_refused_as_that() -> None:
    with pytest.raises(ValueError, match=r"^flag: expected True or False, got 2$"):
        scalar_tensor("flag", 2, torch.bool, LIKE, "q")
    with pytest.raises(TypeError, match=r"^flag: expected True or False or a 0-d tensor, got 'yes'$"):
        scalar_tensor("flag", "yes", torch.bool, LIKE, "q")


@pytest.mark.parametrize("shape", [*product((1, 2), (1, 3), (1, 5))])
def test_elements_of_a_row_follow_each_other_whatever_lies_between_rows(shape: tuple[int, ...]) -> None:
    """In any order of the axes in memory, with one head or many; a row of one element follows itself."""
    for order in permutations(range(3)):
        laid = torch.zeros([shape[axis] for axis in order])
        x = laid.permute([order.index(axis) for axis in range(3)])
        assert x.shape == shape
        if shape[2] == 1 or x.stride(-1) == 1:
            require_contiguous_rows("q", x)
        else:
            with pytest.raises(ValueError, match=r"^q: expected a contiguous last axis"):
                require_contiguous_rows("q", x)
