"""How large the objects are that templates print from: a view is a few parts, and a part a few lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from attnc.resources import resource
from attnc.target import sm90
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


@pytest.mark.parametrize("folder", ["", "sm90"], ids=["all", "sm90"])
def test_templates_are_text_before_they_are_control(folder: str) -> None:
    """Of all lines, at most 18 % are statements of Jinja, and no file has more than 30 %."""
    statements, total = 0, 0
    for path in sorted((resource("templates") / folder).rglob("*.jinja")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found = sum(re.match(r"\s*\{%", line) is not None for line in lines)
        assert found <= 0.30 * len(lines), path.name
        statements, total = statements + found, total + len(lines)
    assert statements <= 0.18 * total


def test_what_templates_of_hopper_print_is_planned_and_not_made_beside_them() -> None:
    """Templates read the plan: what only hands its facts on would be lines here."""
    folder = Path(sm90.__file__).parent
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py")) <= 1200


def test_the_algorithm_of_a_kernel_for_hopper_comes_within_a_hundred_and_fifty_lines() -> None:
    """Both products, the exponentials and the consumer that runs them come before checks and other roles."""
    text = (resource("generated") / "causal_gqa" / "cuda_sm_90a" / "d128.cu").read_text(encoding="utf-8")
    head = "\n".join(text.splitlines()[:150])
    for function in ("mma_qk", "mma_pv", "exponentials", "run_consumer"):
        assert re.search(rf"void {function}\(", head), function


# --- C++ in Python

#: What looks like C++ in a string: a statement, an argument, a call, an operator, an index, a namespace.
_CPP = re.compile(r";|args\.|\w\(.*\)|\w [-+*/<>=&|%?!]+ \w|\[[^\]]*\]|::")


def list_cpp_lines(path: Path) -> set[int]:
    """Lists the lines of a module on which a string begins that looks like C++; docstrings aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in ast.walk(node)} - {id(node)}
        elif isinstance(node, ast.Expr):
            left_out.add(id(node.value))
    found = set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            text = "".join(map(str, parts))
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if _CPP.search(text):
            found.add(node.lineno)  # type: ignore[attr-defined]  # of constants
    return found


def test_cpp_is_in_templates_and_not_in_strings() -> None:
    """Hopper's texts print expressions of a plan, and names. A declaration holds sizes, which are Python."""
    folder = Path(sm90.__file__).parent
    modules = [path for path in folder.glob("*.py") if path.name != "declaration.py"]
    assert sum(len(list_cpp_lines(path)) for path in modules) <= 39
