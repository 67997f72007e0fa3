"""A template says in its first line which object its `text` is, and asks nothing else of it: so whoever reads
`text.x` knows where to look, and what no template asks any more is found.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import get_args, get_type_hints

import jinja2
import pytest
from jinja2 import nodes

from attnc.plan.ir.backward import Chain
from attnc.resources import resource
from attnc.target.files import render_files
from attnc.target.templates import template_environment
from tests.plans import plans_of

ROOT = resource("templates")
PATHS = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.jinja"))
#: Those that may ask `text` for something; `asked` parses them to know.
ASKING = [path for path in PATHS if re.search(r"\btext\.\w", (ROOT / path).read_text(encoding="utf-8"))]
#: `text (sm80.kernel.CudaText)`, below attnc.target; one of several, where kernels of several kinds have it.
_NEED = re.compile(r"\btext \((.*?)\)")
_CLASS = re.compile(r"([\w.]+)\.(\w+)")
_FIRST = re.compile(r"\{#-?(.*?)-?#\}", re.DOTALL)


@cache
def tree(path: str) -> nodes.Template:
    source = (ROOT / path).read_text(encoding="utf-8")
    ends = ("{{", "}}") if path.endswith(".py.jinja") else ("[[", "]]")
    return template_environment(*ends).parse(source)


def needed(path: str) -> tuple[type, ...]:
    """The classes that the first line names."""
    first = _FIRST.match((ROOT / path).read_text(encoding="utf-8"))
    found = _NEED.search(first[1]) if first else None
    return tuple(
        getattr(importlib.import_module(f"attnc.target.{file}"), name)
        for file, name in (_CLASS.findall(found[1]) if found else ())
    )


def asked(path: str, of: str = "text") -> set[str]:
    """The attributes of `text` that a template mentions."""
    found = tree(path).find_all(nodes.Getattr)
    return {x.attr for x in found if isinstance(x.node, nodes.Name) and x.node.name == of}


def asked_of_parts(path: str) -> set[tuple[str, str]]:
    """Attributes of the parts of `text`: `score` and `words` of `text.score.words`."""
    return {
        (x.node.attr, x.attr)
        for x in tree(path).find_all(nodes.Getattr)
        if isinstance(x.node, nodes.Getattr)
        and isinstance(x.node.node, nodes.Name)
        and x.node.node.name == "text"
    }


@cache
def attributes(made: type) -> frozenset[str]:
    """What objects of a class have: members, annotated ones, and those that are made first."""
    names = set(dir(made))
    for base in made.__mro__:
        names |= set(vars(base).get("__annotations__", ()))
        if "__init__" in vars(base) and base is not object:
            if is_dataclass(base):
                continue
            code = ast.parse(textwrap.dedent(inspect.getsource(vars(base)["__init__"])))
            stores = (x for x in ast.walk(code) if isinstance(x, ast.Attribute))
            names |= {x.attr for x in stores if isinstance(x.ctx, ast.Store)}
    return frozenset(names)


def kernels(text: type) -> tuple[type, ...]:
    """The kinds of kernels that texts of a class are of."""
    kind = get_type_hints(text).get("kernel")
    return () if kind is None else get_args(kind) or (kind,)


def parts(path: str) -> set[str]:
    """The templates that one is put together from whatever it prints, with its own `text`."""
    found, conditional = set(), {id(x) for branch in tree(path).find_all(nodes.If) for x in _within(branch)}
    made: list[nodes.Import | nodes.Include] = [*tree(path).find_all(nodes.Import)]
    for node in (*made, *tree(path).find_all(nodes.Include)):
        template = node.template
        if id(node) in conditional:
            continue
        if isinstance(template, nodes.Const):
            found.add(template.value)
        elif isinstance(template, nodes.Concat):  # `"cuda/_split_" ~ text.split ~ ".cu.jinja"`
            start, end = template.nodes[0], template.nodes[-1]
            assert isinstance(start, nodes.Const)
            assert isinstance(end, nodes.Const)
            found |= {x for x in PATHS if x.startswith(start.value) and x.endswith(end.value)}
    return found


def _within(branch: nodes.Node) -> Iterator[nodes.Node]:
    for child in branch.iter_child_nodes():
        yield child
        yield from _within(child)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("path", ASKING)
def test_what_a_template_asks_is_there(path: str) -> None:
    made = needed(path)
    assert made or not asked(path), "the first line says: text (FOLDER.FILE.CLASS)"
    assert asked(path) <= frozenset().union(*map(attributes, made))
    assert asked(path, "chain") <= attributes(Chain)
    kinds = {kind for text in made for kind in kernels(text)}
    assert kinds or not asked(path, "kernel")
    for kind in kinds:
        assert asked(path, "kernel") <= attributes(kind), kind.__name__


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", ASKING)
def test_what_it_asks_of_parts_of_a_text_is_there(path: str) -> None:
    """Of parts whose class an annotation says."""
    for part, name in asked_of_parts(path):
        found = [get_type_hints(made).get(part) for made in needed(path)]
        for kind in found:
            if isinstance(kind, type) and kind.__module__.startswith("attnc.target"):
                assert name in attributes(kind), f"text.{part}.{name}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", ASKING)
def test_its_parts_get_what_they_need(path: str) -> None:
    for part in parts(path):
        wanted = needed(part)
        assert not wanted or all(issubclass(made, wanted) for made in needed(path)), part


def test_what_is_rendered_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: dict[str, set[type]] = {}
    render = jinja2.Template.render

    def recording(self: jinja2.Template, *args: object, **kwargs: object) -> str:
        given = {**(args[0] if args and isinstance(args[0], dict) else {}), **kwargs}
        if "text" in given:
            rendered.setdefault(str(self.name), set()).add(type(given["text"]))
        return render(self, *args, **kwargs)

    monkeypatch.setattr(jinja2.Template, "render", recording)
    for name in ("causal_gqa", "paged_decode", "varlen", "fa1"):
        firsts = {module.target: module for module in plans_of(name).modules}
        for module in firsts.values():
            render_files(module, path="a.attn", sha256="0" * 64)
    assert len(rendered) > 15
    for path, classes in rendered.items():
        assert all(issubclass(x, needed(path)) for x in classes if needed(path)), path


def test_what_nobody_asks_is_not_there() -> None:
    """Of objects for templates: properties that neither a template nor attnc itself reads."""
    everything = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.parent.rglob("*.py"))
    mentioned = {name for path in PATHS for name in asked(path)}
    mentioned |= {x.attr for path in PATHS for x in tree(path).find_all(nodes.Getattr)}
    classes = {base for path in PATHS for made in needed(path) for base in made.__mro__}
    for made in classes - {object}:
        for name, member in vars(made).items():
            if isinstance(member, property) and not name.startswith("_") and name not in mentioned:
                assert re.search(rf"\.{name}\b", everything), f"{made.__name__}.{name}"
