"""Cases of which some run by day, and all of them by night."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def some_by_day(*factors: Iterable[Any], of: int) -> list[ParameterSet]:
    """Returns every combination of the factors as parameters, one in `of` of them by day: along diagonals, so
    that each value of each factor is among these wherever another factor has `of` values.
    """
    values: list[Sequence[Any]] = [tuple(factor) for factor in factors]
    return [
        pytest.param(
            *(factor[i] for factor, i in zip(values, at, strict=True)),
            id="-".join(str(factor[i]) for factor, i in zip(values, at, strict=True)),
            marks=() if sum(at) % of == 0 else pytest.mark.nightly,
        )
        for at in product(*(range(len(factor)) for factor in values))
    ]
