"""How large the objects are that templates print from: a view is a few parts, and a part a few lines."""

from __future__ import annotations

import re

import pytest

from attnc.resources import resource
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


def test_templates_of_hopper_are_text_before_they_are_control() -> None:
    """Of all lines, 18 % are statements of Jinja, and no file has more than 30 %."""
    statements, total = 0, 0
    for path in sorted((resource("templates") / "sm90").glob("*.jinja")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found = sum(re.match(r"\s*\{%", line) is not None for line in lines)
        assert found <= 0.30 * len(lines), path.name
        statements, total = statements + found, total + len(lines)
    assert statements <= 0.18 * total
