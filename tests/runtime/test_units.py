"""Units that are copied and added up, by index and by the kernel, against one element at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.runtime.units import SOURCES, Recipe, _collect_by_index, _collect_by_kernel, collect
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Recipe, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A recipe, its sources, a result to write into and what it is then."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    unit, step = draw(st.sampled_from(((1, 1), (3, 1), (8, 8), (24, 8), (16, 4))))
    units, terms = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    count = draw(st.integers(1, SOURCES))
    sources = [torch.from_numpy(random.normal(size=(20 * unit,))).to(dtype) for _ in range(count)]
    given_ = []
    for _ in range(terms):
        source = random.integers(0, count, units)
        offsets = random.integers(0, 19 * unit // step + 1, units) * step
        given_.append((source, np.where(random.random(units) < 0.2, -1, offsets)))
    into = random.permutation(units + 3)[:units] * unit if draw(st.booleans()) else None
    recipe = Recipe.of(
        unit, [[term] for term in given_], sources[0].element_size(), torch.device("cpu"), into
    )
    out = torch.full(((units + 3) * unit,), 7.0, dtype=draw(st.sampled_from((dtype, torch.bfloat16))))
    expected = out.clone()
    for i in range(units):
        total = torch.zeros(unit)
        for source, offsets in given_:
            if offsets[i] >= 0:
                total = total + sources[source[i]][offsets[i] : offsets[i] + unit].float()
        at = i * unit if into is None else int(into[i])
        expected[at : at + unit] = total.to(out.dtype)
    return recipe, sources, out, expected


@given(drawn())
def test_units_are_sums_of_units(case: Any) -> None:
    recipe, sources, out, expected = case
    assert torch.equal(collect(out, recipe, *sources), expected)


@given(drawn())
def test_the_kernel_collects_what_the_index_does(case: Any) -> None:
    recipe, sources, out, expected = case
    if recipe.at.shape[1]:
        _collect_by_kernel(out, recipe, sources)
        assert torch.equal(out, expected)


def test_views_are_written_and_read_where_they_lie() -> None:
    """Offsets count from a view's first element, and what lies between its rows is left alone."""
    x, y = torch.arange(24.0).view(4, 6)[:, 2:4], torch.zeros(3, 6)
    offsets = np.array([18, 0])
    recipe = Recipe.of(2, [[(0, offsets)]], 4, torch.device("cpu"), into=np.array([0, 6]))
    for collects in (_collect_by_index, _collect_by_kernel):
        y.zero_()
        collects(y[1:, 4:], recipe, [x])
        assert y.nonzero().tolist() == [[1, 4], [1, 5], [2, 4], [2, 5]]
        assert y[1:, 4:].tolist() == [[20.0, 21.0], [2.0, 3.0]]


@pytest.mark.parametrize("unit", [8, 24])
def test_offsets_are_counted_in_the_longest_steps(unit: int) -> None:
    """16 bytes at most, of which everything is a multiple: a thread copies as much at once."""
    offsets = np.array([0, 8 * unit, -1])
    assert Recipe.of(unit, [[(0, offsets)]], 2, torch.device("cpu")).step == 8
    assert Recipe.of(unit, [[(0, offsets + 4)]], 2, torch.device("cpu")).step == 1
    assert Recipe.of(unit, [[(0, offsets)]], 2, torch.device("cpu"), np.array([0, 4, 8])).step == 4
