"""How large the objects are that templates print from: a view is a few parts, and a part a few lines."""

from __future__ import annotations

import pytest

from tests.target.test_template_needs import PATHS, attributes, needed

#: What the templates of CUDA name `text`.
VIEWS = sorted(
    {made for path in PATHS if not path.startswith("triton") for made in needed(path)},
    key=lambda made: made.__qualname__,
)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__qualname__)
def test_a_view_has_few_members_and_few_bases(view: type) -> None:
    public = {name for name in attributes(view) if not name.startswith("_")}
    assert len(public) <= 40, sorted(public)
    assert len(view.__mro__) - 1 <= 3
