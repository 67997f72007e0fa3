"""Which mutants of attnc's own Python a campaign judges: drawn from what Cosmic Ray's operators change.

What only changes annotations, docstrings or options of dataclasses is no mutant.
"""

from __future__ import annotations

import ast
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tools.mutants.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("python.toml").read_text(encoding="utf-8")
)
#: Names of operators that say the same of many: replacements of one sign by another.
_FAMILY = re.compile(r"core/(\w+?)(_[A-Z]\w*)?$")


def draw_mutants(packages: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """Draws so many mutants, none twice: packages take turns, then a module, a family of operators and a site
    are drawn, each with the same chance. Fewer where there are no more.
    """
    chance = random.Random(seed)
    seen: set[Mutant] = set()
    misses = 0
    while len(seen) < count and misses < 50:
        for package in packages:
            file = chance.choice(_modules(package))
            sites = _list_sites(file)
            if not sites:
                continue
            mutant = _mutate(file, *chance.choice(sites[chance.choice(sorted(sites))]))
            is_new = mutant is not None and mutant not in seen and len(seen) < count
            misses = 0 if is_new else misses + 1
            if mutant is not None and is_new:
                seen.add(mutant)
                yield mutant


@cache
def _modules(package: str) -> tuple[str, ...]:
    found = sorted((ROOT / "attnc" / package).rglob("*.py"))
    return tuple(path.relative_to(ROOT).as_posix() for path in found if path.name != "__init__.py")


@cache
def _list_sites(file: str) -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Lists operators and the numbers of their places in a module, by families of operators."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast((ROOT / file).read_text(encoding="utf-8"))))
    found: dict[str, list[tuple[str, int]]] = {}
    for name in sorted(operator_names()):
        operator, family = get_operator(name), _FAMILY.match(name)
        if operator.arguments() or family is None or name.removeprefix("core/") in SETTINGS["excluded"]:
            continue
        count = sum(len(list(operator().mutation_positions(node))) for node in nodes)
        found.setdefault(family[1], []).extend((name, number) for number in range(count))
    return {family: tuple(sites) for family, sites in found.items() if sites}


def _mutate(file: str, operator: str, number: int) -> Mutant | None:
    """Returns the change of an operator at one of its places; None where it makes no other program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = (ROOT / file).read_text(encoding="utf-8")
    made = mutate_code(text, get_operator(operator)(), number)
    if made is None or _meaning(made) in (_meaning(text), ""):
        return None
    family = _FAMILY.match(operator)
    assert family is not None
    return _change(file, family[1], text, made)


def _change(file: str, operator: str, text: str, made: str) -> Mutant:
    """Returns what was changed, as bytes of the file."""
    old, new = text.encode(), made.encode()
    start = _count_same(old, new)
    same = _count_same(old[start:][::-1], new[start:][::-1])
    line = old[:start].count(b"\n") + 1
    return Mutant(
        operator=operator,
        file=file,
        function=".".join(_functions_at(text, line)),
        line=line,
        start=start,
        stop=len(old) - same,
        old=old[start : len(old) - same].decode(),
        new=new[start : len(new) - same].decode(),
    )


def _count_same(left: bytes, right: bytes) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _functions_at(text: str, line: int) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            yield node.name


@lru_cache(maxsize=64)
def _meaning(text: str) -> str:
    """Returns the program without annotations, docstrings, options of `dataclass` and `zip`; "" for none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
            case ast.AnnAssign():
                node.annotation = ast.Constant(value=None)
            case ast.Call(func=ast.Name(id="zip")):
                node.keywords = []  # strict, which says what is so
            case ast.ClassDef():
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call):
                        decorator.keywords = []  # frozen, slots: of interest to type checkers
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[0] = ast.Pass()
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)
