"""Generated modules hold no dead code: whatever a function or the module names is read somewhere. And they
are laid out like Python that somebody has written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "generated").glob("*/*/*.py"))


def unread_locals(function: ast.FunctionDef) -> Iterator[str]:
    """Names of single assignments in a function that nothing in it reads; a tuple is taken as a whole."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        yield from (x.id for x in targets if isinstance(x, ast.Name) and x.id not in read)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", MODULES, ids=lambda path: "-".join(path.parts[-3:]))
def test_every_name_is_read(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [(f.name, name) for f in functions for name in unread_locals(f)] == []
    words = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")]
    assert [name for name in own if not words[name]] == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", MODULES, ids=lambda path: "-".join(path.parts[-3:]))
def test_two_blank_lines_are_before_functions_and_classes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for item in ast.parse(text).body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            first = min(node.lineno for node in (item, *item.decorator_list)) - 1
            while lines[first - 1].startswith("#"):
                first -= 1
            assert lines[first - 3] != "", item.name
            assert lines[first - 2 : first] == ["", ""], item.name
