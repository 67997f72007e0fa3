"""Defaults of passes: each is one that some call leaves to it. What every call says has none, which would be
a second place to be wrong in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
#: Where calls are looked for.
PLACES = ("attnc", "tests", "tools")
#: Of a function, or of a class of fields, the parameters that have defaults, and their places among those
#: that may be given without their names.
Defaults: TypeAlias = dict[str, int | None]


@cache
def trees() -> dict[Path, ast.Module]:
    """Returns the modules of `plan`, and those that import something from it."""
    files = (path for place in PLACES for path in sorted((ROOT / place).glob("**/*.py")))
    texts = ((path, path.read_text(encoding="utf-8")) for path in files)
    return {
        path: ast.parse(text) for path, text in texts if "attnc.plan" in text or "attnc/plan" in f"{path}"
    }


def defaults_of(node: ast.stmt) -> Defaults:
    match node:
        case ast.FunctionDef(args=given):
            named = given.posonlyargs + given.args
            first = len(named) - len(given.defaults)
            found: Defaults = {argument.arg: at for at, argument in enumerate(named) if at >= first}
            pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
            return found | {argument.arg: None for argument, default in pairs if default is not None}
        case ast.ClassDef(decorator_list=decorators, body=body):
            if any("kw_only=True" in ast.unparse(decorator) for decorator in decorators):
                fields = (part for part in body if isinstance(part, ast.AnnAssign) and part.value is not None)
                return {ast.unparse(part.target): None for part in fields}
    return {}


def declared() -> Iterator[tuple[str, Defaults]]:
    """Yields functions and classes of `plan` whose names are theirs alone, from which none inherits."""
    names, inherited = list[str](), set[str]()
    for tree in trees().values():
        names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        inherited |= {ast.unparse(base).rpartition(".")[2] for node in classes for base in node.bases}
    for path, tree in trees().items():
        for node in tree.body if path.is_relative_to(ROOT / "attnc" / "plan") else ():
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in inherited:
                continue
            if names.count(node.name) == 1 and (found := defaults_of(node)):
                yield node.name, found


def gives(call: ast.Call, name: str, at: int | None) -> bool:
    """Returns whether a call says a parameter, for all that is known."""
    is_named = any(keyword.arg in (name, None) for keyword in call.keywords)
    is_placed = at is not None and (
        len(call.args) > at or any(isinstance(argument, ast.Starred) for argument in call.args)
    )
    return is_named or is_placed


def test_each_is_one_that_some_call_leaves_to_it() -> None:
    calls, used = dict[str, list[ast.Call]](), set[str]()
    for tree in trees().values():
        called = set[int]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called.add(id(node.func))
                calls.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
        used |= {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called
        }
    found = [
        f"{name}: {parameter}"
        for name, defaults in declared()
        for parameter, at in defaults.items()
        if (own := calls.get(name)) and all(gives(call, parameter, at) for call in own)
        if name not in used or name[0].isupper()  # what is handed on as a function, others call
    ]
    assert found == [], "every call says these: they want no default"
